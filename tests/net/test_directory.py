"""What is read from the DHT is believed only if it holds. The DHT here is a dictionary."""

from __future__ import annotations

from typing import Any

import pytest

from spheroid_node.errors import RunNotFound, SeveralRuns
from spheroid_node.net import directory as directory_module
from spheroid_node.net.directory import Directory, find_run
from spheroid_node.net.identity import Identity, ephemeral_identity
from spheroid_node.net.keys import Keys
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.messages import MAX_UPDATES_BESIDE, MAX_UPDATES_NAMED, Manifest, UpdateOutcome
from spheroid_node.wire.records import (
    MAX_RECORD_BYTES,
    NodeRecord,
    RunAdvert,
    manifests_key,
    nodes_key,
    run_key,
    runs_key,
)

GROUP = "block-1"
NOW = 1_000.0  # round 100 of the test run


class FakeDht:
    """Everybody's records; `put` is by `peer`."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.keys = Keys()
        self.records: dict[str, dict[str, bytes]] = {}

    def time(self) -> float:
        return NOW

    async def put(self, key: str, value: bytes, ttl: float) -> bool:
        self.records.setdefault(key, {})[self.peer] = value
        return True

    async def get(self, key: str) -> dict[str, bytes]:
        return dict(self.records.get(key, {}))


@pytest.fixture
def dht(alice: Identity) -> Any:
    return FakeDht(alice.peer)


def node(spec: RunSpec, **changes: Any) -> NodeRecord:
    fields: dict[str, Any] = {
        "run": spec.run_id, "block": 1, "state": "online", "host": "127.0.0.1", "port": 1, "device": "cpu",
        "started": 1.0, "round": -1, "held": [], "serves": 0, "accepted": 0, "late": 0, "refused": 0,
        "led": 0,
        "tokens_per_second": 0.0, "train_loss": None, "from_noise_ce": None, "bytes_in": 0, "bytes_out": 0,
        "sessions": 0, "hop_seconds": 0.0,
    }  # fmt: skip
    return NodeRecord.model_validate(fields | changes)


def manifest(spec: RunSpec, accepted: int = 1, **changes: Any) -> Manifest:
    updates = [
        UpdateOutcome(
            peer=ephemeral_identity().peer, digest=bytes(32), tokens=2**62, norm=1.5, verdict=Verdict.ACCEPTED
        )
        for _ in range(accepted)
    ]
    fields: dict[str, Any] = {
        "run": spec.run_id, "group": GROUP, "round": 99, "version": 5, "parent": bytes(32),
        "digest": bytes(32), "elements": 100, "rank": 0, "steps": 10, "updates": updates,
        "total": changes.get("version", 5) - 1 + accepted,
    }  # fmt: skip
    return Manifest.model_validate(fields | changes)


# --- nodes ----------------------------------------------------------------------------------------


async def test_nodes_of_a_block(run, dht, alice) -> None:
    directory = Directory(dht, run)
    record = node(run)
    assert await directory.publish_node(record)
    assert await directory.nodes(1) == {alice.peer: record}
    assert await directory.nodes(0) == {}


@pytest.mark.parametrize(
    "change",
    [{"state": "leaving"}, {"run": "0" * 16}, {"block": 2}],
    ids=["leaving", "another-run", "another-block"],
)
async def test_nodes_that_do_not_count(run, dht, bob, change) -> None:
    dht.records[nodes_key(run.run_id, 1)] = {bob.peer: node(run, **change).pack()}
    assert await Directory(dht, run).nodes(1) == {}


async def test_a_malformed_record_hides_no_other(run, dht, alice, bob) -> None:
    good = node(run)
    dht.records[nodes_key(run.run_id, 1)] = {bob.peer: b"\xc1", alice.peer: good.pack()}
    assert await Directory(dht, run).nodes(1) == {alice.peer: good}


async def test_a_node_that_moved_is_where_it_started_last(run, dht, alice) -> None:
    directory = Directory(dht, run)
    await directory.publish_node(node(run, block=2, started=1.0))
    await directory.publish_node(node(run, block=0, started=2.0))
    assert {peer: record.block for peer, record in (await directory.all_nodes(3)).items()} == {alice.peer: 0}


# --- manifests ------------------------------------------------------------------------------------


async def test_the_best_manifest_comes_first(run, dht, alice, bob) -> None:
    directory = Directory(dht, run)
    assert await directory.manifests(GROUP) == []
    older, newer = manifest(run), manifest(run, version=6)
    dht.records[manifests_key(run.run_id, GROUP)] = {alice.peer: older.seal(alice.key)}
    announced = [(alice.peer, older, older.seal(alice.key))]
    assert await directory.manifests(GROUP) == announced
    dht.records[manifests_key(run.run_id, GROUP)][bob.peer] = newer.seal(bob.key)
    found = await directory.manifests(GROUP, elements=100)
    assert found == [(bob.peer, newer, newer.seal(bob.key)), *announced]


@pytest.mark.parametrize(
    "change",
    [
        {"run": "0" * 16},
        {"group": "block-0"},
        {"version": 500},
        {"round": 500, "version": 6},
        {"elements": 99},
    ],
    ids=["another-run", "another-group", "ahead-of-time", "future-round", "another-shape"],
)
async def test_manifests_that_cannot_be_true(run, dht, bob, change) -> None:
    sealed = manifest(run, **change).seal(bob.key)
    dht.records[manifests_key(run.run_id, GROUP)] = {bob.peer: sealed}
    assert await Directory(dht, run).manifests(GROUP, elements=100) == []


async def test_manifests_of_someone_else(run, dht, alice, bob) -> None:
    """Not signed by who published it; altered; not a manifest; of a peer that may not take part."""
    sealed = manifest(run, version=6).seal(alice.key)
    for value in (sealed, sealed[:-1] + b"\x00", b"\xc1"):
        dht.records[manifests_key(run.run_id, GROUP)] = {bob.peer: value}
        assert await Directory(dht, run).manifests(GROUP) == []
    closed = RunSpec.model_validate(run.model_dump() | {"access": [alice.peer]})
    for author, counts in ((alice, True), (bob, False)):
        value = manifest(closed).seal(author.key)
        dht.records[manifests_key(closed.run_id, GROUP)] = {author.peer: value}
        assert bool(await Directory(dht, closed).manifests(GROUP)) is counts


def test_the_largest_manifest_is_a_record(run, bob) -> None:
    largest = manifest(run, accepted=MAX_UPDATES_NAMED, also=bytes(8 * MAX_UPDATES_BESIDE))
    assert len(largest.seal(bob.key)) + 8 < MAX_RECORD_BYTES


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch) -> None:
    monkeypatch.setattr(directory_module, "FIND_RUN_PAUSE", 0.0)


async def test_the_only_run_is_found(run, dht) -> None:
    assert await Directory(dht, run).publish_run()
    assert await find_run(dht) == run
    assert dht.keys.kind_of(nodes_key(run.run_id, 2)) is not None
    assert await find_run(dht, run.run_id) == run


async def test_no_run_and_an_unknown_run(run, dht) -> None:
    with pytest.raises(RunNotFound, match="any run"):
        await find_run(dht)
    await Directory(dht, run).publish_run()
    with pytest.raises(RunNotFound, match="0123456789abcdef"):
        await find_run(dht, "0123456789abcdef")


async def test_several_runs_must_be_chosen_from(run, dht, bob) -> None:
    other = run.model_copy(update={"seed": 1})
    await Directory(dht, run).publish_run()
    dht.peer = bob.peer
    await Directory(dht, other).publish_run()
    with pytest.raises(SeveralRuns, match=f"{run.run_id}|{other.run_id}"):
        await find_run(dht)
    assert await find_run(dht, other.run_id) == other


async def test_a_false_specification_is_passed_over(run, dht, alice, bob) -> None:
    false = run.model_copy(update={"seed": 1}).pack()
    dht.records[run_key(run.run_id)] = {bob.peer: false, alice.peer: run.pack(), "nobody": b"\xc1"}
    dht.records[runs_key()] = {bob.peer: RunAdvert(run=run.run_id, name="x").pack(), "nobody": b"\xc1"}
    assert await find_run(dht) == run
    del dht.records[run_key(run.run_id)][alice.peer]
    with pytest.raises(RunNotFound):
        await find_run(dht)
