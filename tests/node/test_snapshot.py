import asyncio

import pytest

from spheroid_node.node import snapshot as module
from spheroid_node.node.snapshot import Curve, collect, snapshot_of
from spheroid_node.run import ModelSpec, RoundSpec, RunSpec
from spheroid_node.wire.codes import Reason, Verdict
from spheroid_node.wire.messages import Manifest, UpdateOutcome
from spheroid_node.wire.records import HeldVersion, NodeRecord

RUN = RunSpec(
    name="test",
    model=ModelSpec(blocks=2, layers=1, width=16, heads=2, window=16),
    round=RoundSpec(genesis=1000.0, period=10.0, settle=2.0),
)


def record(block: int, **changes: object) -> NodeRecord:
    fields: dict[str, object] = {
        "run": RUN.run_id,
        "block": block,
        "state": "online",
        "host": "127.0.0.1",
        "port": 4000,
        "device": "cpu",
        "started": 1010.0,
        "round": 3,
        "held": [
            HeldVersion(group=f"block-{block}", version=5, digest=bytes(32)),
            HeldVersion(group="interface", version=6, digest=bytes(32)),
        ],
        "serves": 5,
        "accepted": 4,
        "late": 1,
        "refused": 0,
        "led": 2,
        "tokens_per_second": 100.0,
        "train_loss": 2.5,
        "from_noise_ce": 2.0,
        "bytes_in": 10,
        "bytes_out": 20,
        "sessions": 0,
        "hop_seconds": 0.01,
    }
    return NodeRecord(**(fields | changes))  # type: ignore[arg-type]


def manifest(group: str) -> Manifest:
    outcomes = [
        UpdateOutcome(peer="a", digest=bytes(32), tokens=1, norm=1.0, verdict=Verdict.ACCEPTED),
        UpdateOutcome(
            peer="b", digest=bytes(32), tokens=1, norm=1.0, verdict=Verdict.LATE, reason=Reason.AFTER_DEADLINE
        ),
    ]
    return Manifest(
        run=RUN.run_id, group=group, round=3, version=5, parent=bytes(32), digest=b"\x01" * 32, elements=1,
        rank=0, steps=700, total=9, updates=outcomes,
    )  # fmt: skip


def test_replicas_by_block_with_their_versions() -> None:
    records = {"z": record(0), "c": record(1), "b": record(1, held=[])}
    shown = snapshot_of(RUN, 1037.5, records, {})
    assert [(replica.block, replica.peer) for replica in shown.replicas] == [(0, "z"), (1, "b"), (1, "c")]
    assert (shown.round, shown.seconds_to_deadline) == (3, 0.5)
    (first,) = shown.of_block(0)
    assert (first.version, first.interface_version, first.seconds_up) == (5, 6, 27.5)
    assert shown.of_block(1)[0].version == 0
    assert shown.total("accepted") == 12
    assert shown.missing == ()


def test_a_block_that_nobody_holds_is_missing() -> None:
    assert snapshot_of(RUN, 1037.5, {"a": record(0)}, {}).missing == (1,)


def test_quality_is_what_the_last_block_measured() -> None:
    records = {
        "a": record(0, from_noise_ce=9.0),
        "b": record(1, from_noise_ce=2.0),
        "c": record(1, from_noise_ce=3.0),
        "d": record(1, from_noise_ce=None),
    }
    shown = snapshot_of(RUN, 1037.5, records, {})
    assert shown.from_noise_ce == pytest.approx(2.5)
    assert snapshot_of(RUN, 1037.5, {"a": record(0)}, {}).from_noise_ce is None


def test_the_curve_follows_the_measurements_of_the_last_block() -> None:
    curve = Curve()

    def see(**by_peer: tuple[int, float | None]) -> dict[int, float]:
        records = {peer: record(1, round=number, from_noise_ce=ce) for peer, (number, ce) in by_peer.items()}
        curve.add(snapshot_of(RUN, 1037.5, {"other": record(0, from_noise_ce=9.0), **records}, {}))
        return curve.by_round()

    assert see(a=(-1, 5.5), b=(-1, None)) == {}  # before the first round
    assert see(a=(3, 5.5), b=(3, 5.5)) == {3: 5.5}  # b has measured, a not yet
    assert see(a=(3, 4.5), b=(3, 4.5)) == {3: 4.5}
    assert see(a=(4, 4.5), b=(4, 4.5)) == {3: 4.5}  # handed in, not yet measured
    assert see(a=(4, 4.0), b=(4, 3.0)) == {3: 4.5, 4: 3.5}


def test_versions_come_from_manifests() -> None:
    shown = snapshot_of(RUN, 1037.5, {}, {"block-1": manifest("block-1")})
    (version,) = shown.versions.values()
    assert (version.version, version.steps, version.accepted, version.others) == (5, 700, 1, 1)
    assert shown.as_json()["versions"]["block-1"]["digest"] == "01" * 32
    assert shown.as_json()["blocks_without_replica"] == [0, 1]


class SlowDirectory:
    """Answers for nodes, and never for manifests."""

    async def all_nodes(self, blocks: int) -> dict[str, NodeRecord]:
        return {"a": record(blocks - 1)}

    async def manifests(self, group: str) -> None:
        await asyncio.Event().wait()


async def test_what_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_TIMEOUT", 0.01)
    shown = await collect(SlowDirectory(), RUN, 1037.5)  # type: ignore[arg-type]
    assert [replica.peer for replica in shown.replicas] == ["a"] and shown.versions == {}
