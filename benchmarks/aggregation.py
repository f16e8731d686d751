"""How fast an aggregator adds up updates, in how much memory, and how fast a version travels.

    python -m benchmarks.aggregation

``updates``: simulated workers hand in updates of one group by the node's own path (sealed headers, meter,
spool file, accumulator, manifest), without a network; beside it the mean as one would write it in numpy, over
the same payloads. ``transfer``: one version from one process to another, by our transfer service and over a
bare TLS socket, in turns. ``shards``: the busiest peer of 10,000 workers (:mod:`benchmarks.shards`).
``--only`` measures some of the parts; the rows of the others stay as they are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Literal

import numpy as np
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks import shards
from benchmarks.report import RESULTS, Found, write_result
from spheroid_node.net.dialling import Dialler
from spheroid_node.net.identity import Identity, ephemeral_identity
from spheroid_node.net.links import LinkServer, Traffic
from spheroid_node.net.reader import BUFFER_BYTES
from spheroid_node.net.tls import client_context, server_context
from spheroid_node.net.transfer import fetch_version, serve_transfer
from spheroid_node.node.receiving import IN_MEMORY_BYTES, chunks_of, take
from spheroid_node.node.versions import Held, VersionStore
from spheroid_node.rounds.aggregator import Aggregator, Desk
from spheroid_node.rounds.collection import ACCEPTED, Base
from spheroid_node.run import ModelSpec, RoundSpec, RunSpec, TrainingSpec, block_group
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.messages import HopAddress, Manifest, UpdateHeader, UpdateOutcome
from spheroid_node.wire.signing import peer_id_of_key
from spheroid_node.wire.tensors import (
    CHUNK_BYTES,
    INT8_BLOCK,
    Vector,
    chunks,
    decode_vector,
    encode_vector,
    encoded_size,
    payload_digest,
    vector_bytes,
    vector_digest,
)

GROUP = block_group(0)
ELEMENTS = 25_000_000
"""Parameters of the group: 100 MB in float32."""

AT_ONCE = 4
"""Updates that arrive at the same time. Each lies on disk until it is added."""

TRANSFERRED = 50_000_000
"""Parameters of the version that is transferred: 200 MB in float32."""

Rule = Literal["mean", "clipped", "trimmed-mean", "median"]
Dtype = Literal["fp16", "int8", "float32"]


def run_of(rule: Rule, dtype: Dtype) -> RunSpec:
    return RunSpec(
        name="aggregation",
        model=ModelSpec(blocks=1, layers=1, width=32, heads=2, window=128),
        training=TrainingSpec(local_steps=1000, batch=16),
        round=RoundSpec(genesis=0.0, period=3600.0, aggregation=rule, compression=dtype),
    )


# --- updates --------------------------------------------------------------------------------------


class Peak:
    """The most memory that this process has had since :meth:`begin`, above what it had then, in MB."""

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        self._before = self._kilobytes("VmRSS")

    def megabytes(self) -> float:
        return (self._kilobytes("VmHWM") - self._before) / 1000

    def _kilobytes(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 // 1000


def payload_of(elements: int, dtype: Dtype) -> bytes:
    """An update of normally distributed values: of random bytes many would not be finite."""
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal(1_000_000).astype(np.float32) * np.float32(1e-3)
    return encode_vector(np.resize(drawn, elements), dtype)


def aggregate(dtype: Dtype, rule: Rule, workers: int, elements: int, folder: str) -> dict[str, float]:
    """One round with updates of ``workers``, AT_ONCE of them at a time; seconds, and MB of memory."""
    decode_vector(payload_of(1, dtype), dtype)  # loads what a node has loaded by then
    return uvloop.run(_aggregate(dtype, rule, workers, elements, Path(folder)))


async def _aggregate(dtype: Dtype, rule: Rule, workers: int, elements: int, folder: Path) -> dict[str, float]:
    run, payload, vector = run_of(rule, dtype), payload_of(elements, dtype), np.ones(elements, np.float32)
    base = replace(Base.initial(vector), norms=(1.0,))  # of a round like most, which has one before it
    header = UpdateHeader(
        run=run.run_id, group=GROUP, round=0, base=0, base_digest=base.digest, nonce=bytes(16), steps=1000,
        tokens=1000, norm=1.0, dtype=dtype, elements=elements, digest=payload_digest(payload),
    )  # fmt: skip
    keys = [Ed25519PrivateKey.generate() for _ in range(workers)]

    def spool() -> IO[bytes]:
        return SpooledTemporaryFile(max_size=IN_MEMORY_BYTES, dir=str(folder))

    desk, turn, seats = Desk(run), asyncio.Lock(), asyncio.Semaphore(AT_ONCE)
    aggregator = Aggregator(run, GROUP, 0, base, elements, map(peer_id_of_key, keys), spool)
    desk.open(aggregator)

    async def hand_in(envelope: bytes) -> None:
        """What node.collecting does with an update once its bytes are there."""
        async with seats:
            offer = desk.offer(envelope, now=1.0)
            assert offer.answer is None, offer.answer
            with spool() as place:
                meter = offer.meter()
                for chunk in chunks(payload):
                    await asyncio.to_thread(take, meter, place, chunk)
                facts = meter.facts()
                async with turn:
                    answer = await asyncio.to_thread(desk.deliver, offer, facts, chunks_of(place), 1.0)
            assert answer == ACCEPTED, answer

    peak = Peak()
    peak.begin()
    began = time.perf_counter()
    await asyncio.gather(*(hand_in(header.seal(key)) for key in keys))
    added = time.perf_counter()
    made = await asyncio.to_thread(aggregator.close, vector, 0)
    ended = time.perf_counter()
    assert made is not None and len(made.manifest.updates) == workers
    return {"seconds": ended - began, "close_seconds": ended - added, "peak_mb": peak.megabytes()}


def numpy_mean(dtype: Dtype, rule: Rule, workers: int, elements: int, folder: str) -> dict[str, float]:
    """The plain mean of the same payloads as a running sum: decoded to float32, added, divided."""
    payload = payload_of(elements, dtype)
    total = np.ones(elements, np.float32) * 0  # its pages are there
    began = time.perf_counter()
    for _ in range(workers):
        total += decoded(payload, dtype)
    total /= workers
    return {"seconds": time.perf_counter() - began}


def decoded(payload: bytes, dtype: Dtype) -> Vector:
    """float32 of an update by numpy alone, with no check of what it is."""
    if dtype != "int8":
        return np.frombuffer(payload, "<f2" if dtype == "fp16" else "<f4").astype(np.float32)
    padded = payload + bytes(-len(payload) % INT8_BLOCK.itemsize)
    blocks = np.frombuffer(padded, INT8_BLOCK)
    elements = len(payload) - 4 * len(blocks)
    return np.asarray((blocks["values"] * blocks["scale"][:, None]).reshape(-1)[:elements], np.float32)


Case = tuple[Dtype, Rule, int]
CASES: list[Case] = [
    ("fp16", "mean", 1),
    ("fp16", "mean", 8),
    ("fp16", "mean", 64),
    ("fp16", "clipped", 64),
    ("int8", "mean", 1),
    ("int8", "mean", 8),
    ("int8", "mean", 64),
    ("fp16", "trimmed-mean", 8),
    ("fp16", "median", 8),
]


def updates(asked: argparse.Namespace) -> Found:
    rows = [_measured(case, asked) for case in CASES]
    of = {(row["dtype"], row["rule"], row["workers"]): row for row in rows}
    one, many = of["fp16", "mean", 1], of["fp16", "mean", 64]
    headline = {
        "peak_ratio_64_to_1": round(many["peak_mb"] / one["peak_mb"], 2),
        "ratio_to_numpy_mean": many["ratio_to_numpy"],
    }
    return Found(rows, headline)


def _measured(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    """Ours and numpy in turns, each time in a process of its own; medians."""
    dtype, rule, workers = case
    ours, theirs = [], []
    for _ in range(asked.trials):
        with tempfile.TemporaryDirectory() as folder:
            ours.append(in_process(aggregate, dtype, rule, workers, asked.elements, folder))
            theirs.append(in_process(numpy_mean, dtype, rule, workers, asked.elements, folder))
    megabytes = workers * encoded_size(asked.elements, dtype) / 1e6
    seconds, numpy_seconds = _median(ours, "seconds"), _median(theirs, "seconds")
    row = {
        "dtype": dtype, "rule": rule, "workers": workers, "update_mb": round(megabytes / workers, 1),
        "group_mb": round(4 * asked.elements / 1e6, 1), "seconds": round(seconds, 3),
        "close_seconds": round(_median(ours, "close_seconds"), 3), "mb_per_s": round(megabytes / seconds, 1),
        "numpy_mb_per_s": round(megabytes / numpy_seconds, 1),
        "ratio_to_numpy": round(numpy_seconds / seconds, 2), "peak_mb": round(_median(ours, "peak_mb"), 1),
        "all_seconds": [round(trial["seconds"], 3) for trial in ours],
        "all_numpy_seconds": [round(trial["seconds"], 3) for trial in theirs],
    }  # fmt: skip
    print("updates", json.dumps(row), flush=True)
    return row


def _median(trials: list[dict[str, float]], name: str) -> float:
    return statistics.median(trial[name] for trial in trials)


def in_process(measure: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """What ``measure`` finds in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


# --- transfer -------------------------------------------------------------------------------------

WAYS = ("streams", "protocol", "ours")
"""Bare TLS as asyncio's streams read it, bare TLS without streams, and our service, which hashes as well."""


def transfer(asked: argparse.Namespace) -> Found:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    holder = context.Process(target=hold, args=(theirs, asked.transferred), daemon=True)
    holder.start()
    try:
        rows = uvloop.run(_fetch_in_turns(ours.recv(), asked.transferred, asked.transfers))
    finally:
        holder.kill()
        holder.join()
    rate = {way: statistics.median(row["mb_per_s"] for row in rows if row["way"] == way) for way in WAYS}
    headline = {
        "transfer_mb_per_s": rate["ours"],
        "transfer_ratio": round(rate["ours"] / rate["streams"], 2),
        "transfer_ratio_to_protocol": round(rate["ours"] / rate["protocol"], 2),
    }
    medians = [
        {
            "way": way,
            "mb": rows[0]["mb"],
            "mb_per_s": rate[way],
            "all_mb_per_s": [row["mb_per_s"] for row in rows if row["way"] == way],
        }
        for way in WAYS
    ]
    return Found(medians, headline)


def hold(pipe: Connection, elements: int) -> None:
    """The process of a holder: a link server, and a bare TLS server with the same bytes."""
    uvloop.run(_hold(pipe, elements))


async def _hold(pipe: Connection, elements: int) -> None:
    identity, run = ephemeral_identity(), run_of("mean", "fp16")
    store, digest = version_of(run, identity, elements)
    server = LinkServer(
        identity, run, "127.0.0.1", 0, {"transfer": lambda link: serve_transfer(link, store)}, Traffic()
    )
    await server.start()
    held = store.get(GROUP, 1)
    assert held is not None
    raw = vector_bytes(held.vector)

    async def push(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for start in range(0, len(raw), CHUNK_BYTES):
            writer.write(raw[start : start + CHUNK_BYTES])
            await writer.drain()
        writer.close()

    bare = await asyncio.start_server(push, "127.0.0.1", 0, ssl=server_context(identity))
    pipe.send((identity.peer, server.port, bare.sockets[0].getsockname()[1], digest))
    await asyncio.Event().wait()


class Bare(asyncio.Protocol):
    """Puts what comes into a place of ``size`` bytes."""

    def __init__(self, size: int) -> None:
        self.received = 0
        self.ended = asyncio.Event()
        self._payload = np.empty(size, np.uint8).data

    def data_received(self, data: bytes) -> None:
        self._payload[self.received : self.received + len(data)] = data
        self.received += len(data)

    def connection_lost(self, _: Exception | None) -> None:
        self.ended.set()


def version_of(run: RunSpec, identity: Identity, elements: int) -> tuple[VersionStore, bytes]:
    """A node's versions with one of ``elements`` random parameters, and its digest."""
    vector = np.random.default_rng(0).standard_normal(elements, dtype=np.float32)
    digest = vector_digest(vector)
    outcome = UpdateOutcome(peer=identity.peer, digest=digest, tokens=1, norm=1.0, verdict=Verdict.ACCEPTED)
    manifest = Manifest(
        run=run.run_id, group=GROUP, round=0, version=1, parent=digest, digest=digest, elements=elements,
        rank=0, steps=1, total=1, updates=[outcome],
    )  # fmt: skip
    store = VersionStore(run)
    store.adopt(Held.of(GROUP, 1, vector, manifest.seal(identity.key)))
    return store, digest


async def _fetch_in_turns(
    holder: tuple[str, int, int, bytes], elements: int, transfers: int
) -> list[dict[str, Any]]:
    peer, port, bare_port, digest = holder
    address, size, rows = HopAddress(peer=peer, host="127.0.0.1", port=port), 4 * elements, []
    dialler = Dialler(ephemeral_identity(), run_of("mean", "fp16").run_id, Traffic())

    async def ours() -> None:
        payload, _ = await fetch_version(
            [address], GROUP, 1, digest, size, lambda to: dialler.dial(to, "transfer")
        )
        assert len(payload) == size

    async def streams() -> None:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", bare_port, ssl=client_context(), limit=BUFFER_BYTES
        )
        payload = np.empty(size, np.uint8).data
        for start in range(0, size, CHUNK_BYTES):
            end = min(start + CHUNK_BYTES, size)
            payload[start:end] = await reader.readexactly(end - start)
        writer.transport.abort()

    async def protocol() -> None:
        loop = asyncio.get_running_loop()
        transport, bare = await loop.create_connection(
            lambda: Bare(size), "127.0.0.1", bare_port, ssl=client_context()
        )
        await bare.ended.wait()
        transport.abort()
        assert bare.received == size

    for turn in range(-1, transfers):  # the first is a warm-up
        for way, fetch in (("streams", streams), ("protocol", protocol), ("ours", ours)):
            began = time.perf_counter()
            await fetch()
            seconds = time.perf_counter() - began
            row = {"way": way, "turn": turn, "mb": size / 1e6, "seconds": round(seconds, 3)}
            rows.append(row | {"mb_per_s": round(size / 1e6 / seconds, 1)})
            print("transfer", json.dumps(rows[-1]), flush=True)
    return [row for row in rows if row["turn"] >= 0]


# --- all ------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "updates": updates,
    "transfer": transfer,
    "shards": lambda _: shards.found(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="parameters of the group")
    parser.add_argument("--trials", type=int, default=3, help="of each number of workers")
    parser.add_argument("--transferred", type=int, default=TRANSFERRED, help="parameters of the version")
    parser.add_argument("--transfers", type=int, default=15, help="each way")
    parser.add_argument("--only", nargs="+", choices=[*PARTS])
    asked = parser.parse_args()
    path = RESULTS / "aggregation.json"
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], "headline": {}}
    rows: list[dict[str, Any]] = before["rows"]
    headline: dict[str, float] = before["headline"]
    for name in asked.only or PARTS:
        found = PARTS[name](asked)
        rows = [row for row in rows if row["table"] != name] + [{"table": name, **row} for row in found.rows]
        headline |= found.headline
        write_result("aggregation", [0], rows, headline)
    print(headline)


if __name__ == "__main__":
    main()
