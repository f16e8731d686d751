"""What must hold in a swarm whatever is done to it, watched while it lives.

Seen are the nodes' logs, the files in their state directories, and what nodes answer over the wire. A rule
that is broken is a :class:`Violation`, once for each place:

``shrunk``      A node follows a version with fewer updates behind it than before (one that was cut off may go
                back to a lower version of the swarm's, which has more). Allowed where a full disk had kept it
                from writing (``disk.not_written``) and it then ended, and where it ended and only had a copy.
``forked``      Two nodes that nobody hurts keep to two versions of one number. Two aggregators may each write
                one, and all must follow the same: within the settling part where all hear each other, and a
                node that has just been cut off or asleep with the next round. So this is counted only when it
                lasts FORK_ROUNDS rounds, between nodes that have had their peace as long.
``unlinked``    A node keeps a version beside one that was not made from it: a fork that lost and stayed.
``damaged``     A version on disk that cannot be read, or is not what its manifest signs.
``not-finite``  A parameter in it that is no number.
``lost``        An accepted update that is in no version of the line, and that its worker has not kept either.
``twice``       One that is in two versions, or in one and carried on by its worker all the same.

The line of a group is its newest version at the end and, by the parents that manifests name, all before it.
An update is followed by its digest: from the receipt in its worker's log into the manifests. What the
worker keeps is read from its outbox: there, beside the next update, lies what was left over of the one
before. If that holds most of the update (more than half of it, beside what was taken back of those
before it), the worker carries it on; if not, it takes it for done; what it says afterwards
(``round.recounted``) counts instead. Updates of which too little was seen (their worker was killed between
two looks), those of the last rounds, and those that a worker said it had to drop (its disk was full, or it
was away for longer than they are of use) are counted as ``unknown``; updates of others are not followed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spheroid_node.config import LOOPBACK
from spheroid_node.errors import CheckpointInvalid, RunMismatch
from spheroid_node.model.parameters import elements
from spheroid_node.net.identity import ephemeral_identity
from spheroid_node.net.links import Dialler, LinkFailed, Traffic
from spheroid_node.node.outbox import read_outbox
from spheroid_node.rounds.ledger import held
from spheroid_node.rounds.slots import Slots
from spheroid_node.run import RunSpec
from spheroid_node.training.checkpoint import read_version
from spheroid_node.wire.codes import Verdict, WireError
from spheroid_node.wire.messages import HopAddress, Listing, Manifest, Want
from spheroid_node.wire.tensors import Vector, vector_digest

FORK_ROUNDS = 3.0
CARRIED = 0.5
WIRE_SECONDS = 5.0


class Violation(NamedTuple):
    rule: str
    node: str
    where: str
    detail: str
    at: float


class Word(NamedTuple):
    """What a node last said that it follows."""

    version: int
    digest: str
    total: int
    """Updates behind it."""


class Kept(NamedTuple):
    version: int
    digest: bytes
    parent: bytes | None
    """None at version 0."""


class Accepted(NamedTuple):
    """A receipt in a worker's log."""

    node: str
    group: str
    round: int
    aggregator: str


@dataclass
class _Open:
    """The update in a worker's outbox when last looked, and all that it is."""

    digest: str
    round: int
    sent: Vector
    before: list[Vector]
    """Those before it: what is left over may lack them too, if a version has them after all."""


class Invariants:
    """Of a run whose nodes have their state directories in ``folder``."""

    def __init__(self, run: RunSpec, folder: Path) -> None:
        self.violations: list[Violation] = []
        self.accepted: dict[str, Accepted] = {}
        self.counts: Counter[str] = Counter()
        """What was looked at, so that nobody takes a watch that saw nothing for peace."""
        self._run, self._folder = run, folder
        self._slots = Slots.of(run.round)
        self._words: dict[str, dict[str, Word]] = defaultdict(dict)
        self._own: dict[str, frozenset[str]] = {}
        """Groups that a node trains; copies of others are gone when it ends."""
        self._unwritten: set[str] = set()
        self._dropped: set[tuple[str, str]] = set()
        """Outboxes, by node and group, that their owner said it could not save or found too old."""
        self._forked_since: dict[tuple[str, frozenset[tuple[str, Word]]], float] = {}
        self._files: dict[Path, int] = {}
        self._kept: dict[str, dict[Path, Kept]] = defaultdict(dict)
        self._unlinked: set[tuple[str, str, bytes, bytes]] = set()
        self._manifests: dict[tuple[str, bytes], Manifest] = {}
        self._outboxes: dict[tuple[str, str], _Open | None] = {}
        self._carried: dict[str, bool] = {}
        self._recounted: dict[str, bool] = {}
        """What workers said when they found out better, by update: whether they carry it on."""
        self._broken: set[tuple[str, str, str]] = set()

    def broken(self, rule: str, node: str, where: str, detail: str) -> None:
        if (rule, node, where) not in self._broken:
            self._broken.add((rule, node, where))
            self.violations.append(Violation(rule, node, where, detail, round(time.time(), 1)))
            print(f"broken: {rule}: {node} {where}: {detail}", flush=True)  # an hour's watch may be cut short

    # --- logs -------------------------------------------------------------------------------------

    def observe(self, node: str, event: Mapping[str, Any]) -> None:
        """An event of a node's log."""
        name = event["event"]
        if name == "round.version":
            self._follows(node, event["group"], Word(event["version"], event["digest"], event["total"]))
        elif name == "node.started":
            self._own[node] = frozenset(event["versions"])
            for group in self._words[node].keys() - self._own[node]:
                del self._words[node][group]
            for group, version in event["versions"].items():
                before = self._words[node].get(group)
                if before and version < before.version and node not in self._unwritten:
                    self.broken("shrunk", node, group, f"{before.version} before its end, {version} after")
                if before and version != before.version:
                    del self._words[node][group]  # it will say which one it follows
            self._unwritten.discard(node)
        elif name == "disk.not_written" and event["what"] == "versions":
            self._unwritten.add(node)
        elif name == "disk.not_written":
            self._dropped |= {(node, group) for group in self._run.groups}
        elif name == "outbox.too_old":
            self._dropped.add((node, event["group"]))
        elif name == "round.recounted":
            self._recounted[event["update"]] = not event["contained"]
        elif name == "round.receipt" and event["verdict"] == "accepted":
            self.accepted[event["update"]] = Accepted(
                node, event["group"], event["round"], event["aggregator"]
            )

    def _follows(self, node: str, group: str, word: Word) -> None:
        self.counts["versions followed"] += 1
        before = self._words[node].get(group)
        if before and word.total < before.total:
            self.broken("shrunk", node, f"{group} {word.version}", f"it followed {before.version} before")
        self._words[node][group] = word

    def agree(self) -> bool:
        """Whether all nodes that train a group follow the same version of it now."""
        return all(len(set(words.values())) == 1 for words in self._by_group().values())

    def newest(self) -> dict[str, dict[str, str]]:
        """By group and node: what each follows, for a person."""
        return {
            group: {node: f"{word.version} {word.digest[:8]}" for node, word in words.items()}
            for group, words in self._by_group().items()
        }

    def _by_group(self) -> dict[str, dict[str, Word]]:
        groups: dict[str, dict[str, Word]] = defaultdict(dict)
        for node, words in self._words.items():
            for group, word in words.items():
                groups[group][node] = word
        return groups

    def _look_for_forks(self, calm_since: Mapping[str, float]) -> None:
        now, patience = time.time(), FORK_ROUNDS * self._slots.period
        seen = {}
        for group, words in self._by_group().items():
            calm = {node: word for node, word in words.items() if now - calm_since.get(node, now) > patience}
            for number in {word.version for word in calm.values()}:
                keepers = frozenset((node, word) for node, word in calm.items() if word.version == number)
                if len({word.digest for _, word in keepers}) > 1:
                    seen[group, keepers] = self._forked_since.get((group, keepers), now)
                    if now - seen[group, keepers] > patience:
                        self.broken("forked", "", f"{group} {number}", str(sorted(keepers)))
        self._forked_since = seen

    # --- files ------------------------------------------------------------------------------------

    def look(self, calm_since: Mapping[str, float]) -> None:
        """At all state directories, and at what the logs have said so far.

        ``calm_since`` says of every node when it was last hurt; infinity while it is.
        """
        self._look_for_forks(calm_since)
        for node in calm_since:
            self._look_at_versions(node)
            for path in (self._folder / node / "outbox").glob("*/*.safetensors"):
                self._look_at_outbox(node, path)

    def _changed(self, path: Path) -> bool:
        try:
            stat = path.stat()
        except FileNotFoundError:
            return False
        written = hash((stat.st_mtime_ns, stat.st_ino))
        changed = self._files.get(path) != written
        self._files[path] = written
        return changed

    def _look_at_versions(self, node: str) -> None:
        files = set((self._folder / node / "versions").glob("*/*.safetensors"))
        self._kept[node] = {path: kept for path, kept in self._kept[node].items() if path in files}
        for path in sorted(files):
            if self._changed(path) and (kept := self._read(node, path)) is not None:
                self._kept[node][path] = kept
        unlinked = set()
        for path, kept in self._kept[node].items():
            for other, older in self._kept[node].items():
                follows = other.parent == path.parent and older.version == kept.version - 1
                if follows and kept.parent not in (None, older.digest):
                    unlinked.add((node, path.parent.name, kept.digest, older.digest))
        # What is read between two files of one change is put right at the next look.
        for found in unlinked & self._unlinked:
            detail = f"{found[3].hex()[:8]} beside {found[2].hex()[:8]}, which was not made from it"
            self.broken("unlinked", node, f"{found[1]} {found[3].hex()[:8]}", detail)
        self._unlinked = {found for found in self._unlinked if found[0] != node} | unlinked

    def _read(self, node: str, path: Path) -> Kept | None:
        group = path.parent.name
        try:
            stored = read_version(path, self._run, group)
            manifest = Manifest.unseal(stored.manifest)[1] if stored.manifest else None
        except (CheckpointInvalid, RunMismatch, WireError) as error:
            if path.exists():
                self.broken("damaged", node, f"{group} {path.name}", str(error))
            return None
        self.counts["version files read"] += 1
        where = f"{group} {stored.version}"
        if not np.isfinite(stored.payload).all():
            self.broken("not-finite", node, where, "on disk")
        digest = vector_digest(stored.payload)
        if manifest is None:
            return Kept(stored.version, digest, None)
        if (manifest.group, manifest.version, manifest.digest) != (group, stored.version, digest):
            self.broken("damaged", node, where, "its manifest signs something else")
        self._manifests[group, digest] = manifest
        return Kept(stored.version, digest, manifest.parent)

    def _look_at_outbox(self, node: str, path: Path) -> None:
        if not self._changed(path):
            return
        group = path.parent.name
        size = elements(self._run, group)
        try:
            round, kept = read_outbox(path.parent, self._run, group, size)
        except CheckpointInvalid:
            return  # the node itself says so where that is more than a change under our eyes
        self.counts["outboxes read"] += 1
        found = None
        if kept.submission is not None:
            header, sent = kept.submission.header, kept.submission.delivered()
            before_it = [entry.submission.delivered() for entry in kept.settled]
            found = _Open(header.digest.hex(), header.round, sent, before_it)
            if not np.isfinite(sent).all():
                self.broken("not-finite", node, f"update of {group}", f"in round {header.round}")
        digest, reached = (found.digest, found.round) if found is not None else ("", round)
        before = self._outboxes.get((node, group))
        if before is not None and before.digest != digest:
            missed = self._missed(node, group, before.round, reached)
            if not missed and (node, group) not in self._dropped:
                self._carried[before.digest] = _share(held(kept.settled, size), before) > CARRIED
        if before is None or before.digest != digest:
            self._dropped.discard((node, group))
        self._outboxes[node, group] = found

    def _missed(self, node: str, group: str, after: int, before: int) -> bool:
        """Whether an update in between was never seen: then what it left over says nothing of this one."""
        return any(
            (found.node, found.group) == (node, group) and after < found.round < before
            for found in self.accepted.values()
        )

    # --- over the wire ----------------------------------------------------------------------------

    async def ask(self, addresses: Mapping[str, HopAddress]) -> dict[tuple[str, str], Word]:
        """What nodes hand out as their newest, by node and group; those that do not answer are left out.

        A node that nobody hurts must not hand out less than it did before.
        """
        dialler = Dialler(ephemeral_identity(), self._run.run_id, Traffic(), None)
        found: dict[tuple[str, str], Word] = {}

        async def ask_one(node: str, address: HopAddress) -> None:
            with suppress(LinkFailed, WireError, OSError, TimeoutError):
                async with asyncio.timeout(WIRE_SECONDS):
                    link = await dialler.dial(address, "transfer")
                    try:
                        for group in self._own.get(node, ()):
                            await link.send(Want(group=group, version=-1))
                            listing = await link.expect(Listing)
                            manifest = Manifest.unseal(listing.manifest)[1] if listing.manifest else None
                            digest = manifest.digest.hex() if manifest else ""
                            total = manifest.total if manifest else 0
                            found[node, group] = Word(listing.version, digest, total)
                    finally:
                        link.abort()

        before = {node: dict(words) for node, words in self._words.items()}
        await asyncio.gather(*(ask_one(node, address) for node, address in addresses.items()))
        for (node, group), word in found.items():
            self.counts["answers over the wire"] += 1
            known = before.get(node, {}).get(group)
            if known and word.total < known.total and node not in self._unwritten:
                self.broken(
                    "shrunk", node, f"{group} {word.version}", f"{known.version} over the wire before"
                )
        return found

    # --- at the end -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Follow every accepted update along the lines of its group."""
        lines = {group: self._line(group) for group in self._run.groups}
        on_line = {(group, manifest.digest) for group, line in lines.items() for manifest in line}
        contained: dict[str, list[int]] = defaultdict(list)
        forked: dict[str, list[int]] = defaultdict(list)
        for key, manifest in self._manifests.items():
            for update in manifest.updates:
                if update.verdict is Verdict.ACCEPTED:
                    place = contained if key in on_line else forked
                    place[update.digest.hex()].append(manifest.version)
        for digest, found in self.accepted.items():
            self._judge(digest, found, contained[digest], forked[digest], lines[found.group])

    def _judge(
        self, digest: str, found: Accepted, contained: list[int], forked: list[int], line: list[Manifest]
    ) -> None:
        where = f"{found.group} round {found.round}"
        carried = self._recounted.get(digest, self._carried.get(digest))
        opened = self._outboxes.get((found.node, found.group))
        said = f"accepted by {found.aggregator[-6:]}, on the line in {contained}, beside it in {forked}"
        if len(contained) > 1 or (contained and carried):
            self.counts["updates twice"] += 1
            self.broken("twice", found.node, where, f"{said}, carried on: {carried}")
        elif contained:
            self.counts["updates in a version"] += 1
        elif carried or (opened is not None and opened.digest == digest):
            self.counts["updates kept by their worker"] += 1
        elif carried is None or not _covers(line, found.round):
            self.counts["updates unknown"] += 1
        else:
            self.counts["updates lost"] += 1
            self.broken("lost", found.node, where, said)

    def _line(self, group: str) -> list[Manifest]:
        """The manifests of the line, newest first, as far as they were seen on a disk."""
        followed = [
            manifest
            for word in self._by_group().get(group, {}).values()
            if (manifest := self._manifests.get((group, bytes.fromhex(word.digest)))) is not None
        ]
        line = [max(followed, key=lambda manifest: manifest.total)] if followed else []
        while line and (older := self._manifests.get((group, line[-1].parent))) is not None:
            line.append(older)
        self.counts["versions on the line"] += len(line)
        return line


def _covers(line: list[Manifest], round: int) -> bool:
    """Whether the version that a round made would be among these: it is neither too old nor too new."""
    return bool(line) and (line[-1].round <= round or line[-1].version == 1) and round <= line[0].round


def _share(residual: Vector, update: _Open) -> float:
    """How much of an update is in ``residual``: 0 is nothing, 0.9 what a worker keeps of a lost one.

    It is found together with how much of the updates before is in it, by least squares.
    """
    basis = np.stack([update.sent, *update.before], axis=1).astype(np.float64)
    return float(np.linalg.lstsq(basis, residual.astype(np.float64), rcond=None)[0][0])


def address_of(started: Mapping[str, Any]) -> HopAddress:
    """Where a node that said so at its start listens itself, whatever stands before it."""
    return HopAddress(peer=started["peer"], host=LOOPBACK, port=started["data_port"])
