"""A peer that means harm: it enters a swarm, calls itself a replica, and sends whatever does damage.

    python -m benchmarks.hostile_peer --peer ADDRESS --run ID --block 0 --seconds 30 --seed 0

Updates that are flipped, scaled, random, stale or not finite; an update twice, an old one again, one that
somebody else signed; a version that nobody hands out; frames that are no message, lengths beyond the limit,
bytes that are no TLS. A line of JSON for each says what came of it, and the exit code is 1 if one that must
never be taken was accepted, 3 if nobody was there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from spheroid_node.cli.runner import run_async
from spheroid_node.config import LOOPBACK, NodeConfig
from spheroid_node.errors import NetworkError
from spheroid_node.model.parameters import elements
from spheroid_node.net.identity import ephemeral_identity
from spheroid_node.net.links import Link, LinkFailed
from spheroid_node.node.access import Client, open_client
from spheroid_node.node.holdings import owns
from spheroid_node.node.report import Report, Reporter
from spheroid_node.node.sync import Synchroniser
from spheroid_node.node.versions import VersionStore
from spheroid_node.rounds.contribution import Contributor
from spheroid_node.rounds.election import ranking
from spheroid_node.rounds.ledger import Submission
from spheroid_node.rounds.slots import Slots
from spheroid_node.simulate.hostile import ATTACKS, forged
from spheroid_node.wire.codes import Verdict, WireError
from spheroid_node.wire.frames import HEADER, MAX_FRAME
from spheroid_node.wire.messages import (
    Chunk,
    HopAddress,
    Manifest,
    Proceed,
    Receipt,
    ReceiptMessage,
    Update,
    UpdateHeader,
    UpdateOutcome,
)
from spheroid_node.wire.records import NodeRecord
from spheroid_node.wire.tensors import chunk_hashes, chunks, vector_digest

NEVER = frozenset({"nan", "stale", "again", "twice", "signed by another", "garbage", "too long", "no TLS"})
"""What no aggregator may accept. The others may be: what they do to a version is the rule's concern."""
ANSWER_SECONDS = 5.0
PAUSE_SECONDS = 0.5


class Hostile:
    """One hostile peer, in one block."""

    def __init__(self, client: Client, block: int, seed: int) -> None:
        self._client, self._block, self._rng = client, block, random.Random(seed)
        self._seed = seed
        self._store = VersionStore(client.run)
        self._sync = Synchroniser(client, self._store)
        self._slots = Slots.of(client.run.round)
        self._old: dict[str, tuple[bytes, bytes]] = {}
        """The first update of each group, as it was sent."""
        self.accepted: list[str] = []
        """What should never have been."""

    async def run(self, seconds: float) -> None:
        """Call itself a replica that listens where nobody speaks our language, and do harm."""
        server = await asyncio.start_server(self._babble, LOOPBACK, 0)
        port = server.sockets[0].getsockname()[1]
        address = HopAddress(peer=self._client.identity.peer, host=LOOPBACK, port=port)
        report = Report(self._block, "cpu", state="online")
        await asyncio.gather(*map(self._sync.sync, self._client.run.worker_groups(self._block)))
        reporter = Reporter(self._client, self._store, report, address)
        publishing = asyncio.create_task(reporter.run())
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                for group in self._client.run.worker_groups(self._block):
                    await self._harm(group)
                await asyncio.sleep(PAUSE_SECONDS)
        finally:
            publishing.cancel()
            server.close()
            await reporter.leave()

    async def _babble(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await reader.read(64)
            writer.write(self._rng.randbytes(4096))
            await writer.drain()
        writer.close()

    # --- what it sends ----------------------------------------------------------------------------

    async def _harm(self, group: str) -> None:
        with suppress(LinkFailed, WireError, OSError, TimeoutError):  # there is always a next time
            await self._one_harm(group)

    async def _one_harm(self, group: str) -> None:
        submission = await self._submission(group)
        sealed = submission.header.seal(self._client.identity.key)
        attack = self._rng.choice([*ATTACKS, *sorted(NEVER - set(ATTACKS)), "a version"])
        if attack == "stale" and not submission.header.base:
            return  # there is nothing before version 0
        if attack in ATTACKS:
            bad = forged(submission, attack, self._seed, 0)
            sealed = bad.header.seal(self._client.identity.key)
            self._old.setdefault(group, (sealed, bad.payload))
            await self._say(attack, group, self._offer(group, sealed, bad.payload))
        elif attack == "again":
            old = self._old.get(group, (sealed, submission.payload))
            # One of a round that may still be open would be an honest repetition.
            if group in self._old and self._round_of(old[0]) < self._round() - 1:
                await self._say(attack, group, self._offer(group, *old))
        elif attack == "twice":
            first = await self._offer(group, sealed, submission.payload)
            other = await self._submission(group)
            if first.startswith("accepted") and other.header.round == submission.header.round:
                seal = other.header.seal(self._client.identity.key)
                await self._say(attack, group, self._offer(group, seal, other.payload))
        elif attack == "signed by another":
            sealed = submission.header.seal(ephemeral_identity().key)
            await self._say(attack, group, self._offer(group, sealed, submission.payload))
        elif attack == "garbage":
            await self._say(attack, group, self._raw(group, self._frame(self._rng.randbytes(5000))))
        elif attack == "a version":
            await self._say(attack, group, self._announce(group))
        elif attack == "too long":
            await self._say(attack, group, self._raw(group, HEADER.pack(self._rng.choice(TOO_LONG))))
        else:
            await self._say(attack, group, self._no_tls(group))

    def _frame(self, body: bytes) -> bytes:
        return HEADER.pack(len(body)) + body

    def _round(self) -> int:
        return self._slots.round_at(self._client.dht.time())

    def _round_of(self, sealed: bytes) -> int:
        return UpdateHeader.unseal(sealed)[1].round

    async def _submission(self, group: str) -> Submission:
        """As a worker would make it, but that it has learnt nothing."""
        held = await self._sync.sync(group)
        size = elements(self._client.run, group)
        noise = np.random.default_rng(self._rng.randrange(2**32)).standard_normal(size, dtype=np.float32)
        norm = float(np.median(held.base.norms)) if held.base.norms else 1.0
        update = noise * np.float32(norm / max(float(np.linalg.norm(noise)), 1e-9))
        training = self._client.run.training
        tokens = training.local_steps * training.batch * self._client.run.model.window
        return Contributor(self._client.run, group, size).prepare(
            self._round(),
            held.base,
            update,
            training.local_steps,
            tokens,
            self._rng.randbytes(16),
        )

    async def _announce(self, group: str) -> str:
        """A version better than all others, of zeros, which nobody hands out."""
        held = await self._sync.sync(group)
        digest = vector_digest(np.zeros_like(held.payload))
        outcomes = [
            UpdateOutcome(
                peer=ephemeral_identity().peer, digest=digest, tokens=1, norm=1.0, verdict=Verdict.ACCEPTED
            )
            for _ in range(self._rng.randrange(1, 9))
        ]
        manifest = Manifest(
            run=self._client.run.run_id,
            group=group,
            round=max(self._round(), held.round + 1),
            version=held.version + 1,
            parent=held.digest,
            digest=digest,
            elements=held.elements,
            rank=0,
            steps=held.steps,
            total=held.base.total + len(outcomes),
            updates=outcomes,
        )
        sealed = manifest.seal(self._client.identity.key)
        await self._client.directory.publish_manifest(group, sealed)
        return "announced"

    # --- how it sends -----------------------------------------------------------------------------

    async def _aggregator(self, group: str) -> HopAddress:
        nodes = await self._sync.nodes()
        able: dict[str, NodeRecord] = {
            peer: record
            for peer, record in nodes.items()
            if owns(record, group) and peer != self._client.identity.peer
        }
        if not able:
            raise LinkFailed(HopAddress(peer="?", host=LOOPBACK, port=1), "nobody is there")
        peer = ranking(self._client.run.run_id, group, self._round(), able)[0]
        return HopAddress(peer=peer, host=able[peer].host, port=able[peer].port)

    async def _offer(self, group: str, sealed: bytes, payload: bytes) -> str:
        """The receipt, in words."""

        async def talk(link: Link) -> str:
            await link.send(Update(header=sealed, hashes=chunk_hashes(payload)))
            answer = await link.receive(ANSWER_SECONDS)
            if isinstance(answer, Proceed):
                for index, chunk in enumerate(chunks(payload)):
                    await link.send(Chunk(index=index, data=bytes(chunk)))
                answer = await link.receive(ANSWER_SECONDS)
            if isinstance(answer, ReceiptMessage):
                receipt = Receipt.unseal(answer.receipt)[1]
                return f"{receipt.verdict} {receipt.reason}".strip()
            return type(answer).__name__

        return await self._with_link(group, talk)

    async def _raw(self, group: str, data: bytes) -> str:
        async def talk(link: Link) -> str:
            link._writer.write(data)  # a Link itself sends nothing of this kind
            return type(await link.receive(ANSWER_SECONDS)).__name__

        return await self._with_link(group, talk)

    async def _with_link(self, group: str, talk: Callable[[Link], Awaitable[str]]) -> str:
        link = await self._client.dial(await self._aggregator(group), "round")
        try:
            return await talk(link)
        finally:
            link.abort()

    async def _no_tls(self, group: str) -> str:
        address = await self._aggregator(group)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        try:
            writer.write(self._rng.randbytes(20_000))
            async with asyncio.timeout(ANSWER_SECONDS):
                return "closed" if len(await reader.read(1024)) < 1024 else "it talks"
        finally:
            writer.transport.abort()

    async def _say(self, attack: str, group: str, outcome: Awaitable[str]) -> None:
        try:
            answer = await outcome
        except (LinkFailed, WireError, OSError, TimeoutError) as error:
            answer = f"{type(error).__name__}: {error}"
        if attack in NEVER and answer.startswith("accepted"):
            self.accepted.append(f"{attack} in {group}")
        print(json.dumps({"attack": attack, "group": group, "answer": answer}), flush=True)


TOO_LONG = (0, MAX_FRAME + 1, 2**31, 2**32 - 1)


async def _run(asked: argparse.Namespace) -> list[str]:
    config = NodeConfig(state_dir=Path(), peers=tuple(asked.peer), run=asked.run, host=LOOPBACK)
    async with open_client(config, ephemeral_identity(), client_mode=True) as client:
        hostile = Hostile(client, asked.block, asked.seed)
        await hostile.run(asked.seconds)
        return hostile.accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peer", action="append", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--block", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    try:
        accepted = run_async(_run(parser.parse_args()))
    except NetworkError as error:
        print(error)
        sys.exit(error.exit_code)
    if accepted:
        sys.exit(f"accepted, and should never have been: {', '.join(accepted)}")


if __name__ == "__main__":
    main()
