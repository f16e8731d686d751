"""The keys that a node knows, and what may stand under them."""

from __future__ import annotations

import pytest

from spheroid_node.net.keys import ANSWER_BYTES, CLOCK_SLACK, NODE_BYTES, Keys
from spheroid_node.run import ModelSpec, RoundSpec, RunSpec
from spheroid_node.wire.frames import pack
from spheroid_node.wire.records import (
    MAX_NEIGHBOURS,
    MAX_SHARDS,
    NODE_TTL,
    SHARD_BYTES,
    HeldVersion,
    Neighbour,
    NodeRecord,
    manifest_ttl,
    manifests_key,
    nodes_key,
    run_key,
    runs_key,
)

NOW = 1_000_000.0


def known(run: RunSpec) -> Keys:
    keys = Keys()
    keys.know(run)
    return keys


def with_shards(run: RunSpec, shards: int) -> RunSpec:
    return run.model_copy(update={"round": run.round.model_copy(update={"shards": shards})})


def test_the_keys_of_a_run_and_no_others(run) -> None:
    keys = known(run)
    for block in range(3):
        assert keys.kind_of(nodes_key(run.run_id, block)) is not None
        assert keys.kind_of(manifests_key(run.run_id, f"block-{block}")) is not None
    assert keys.kind_of(manifests_key(run.run_id, "interface")) is not None
    for other in (
        nodes_key(run.run_id, 3),
        manifests_key(run.run_id, "block-3"),
        manifests_key(run.run_id, "block-0.0"),
        nodes_key("0" * 16, 0),
        run_key("0" * 16),
        "spheroid/1/x",
    ):
        assert keys.kind_of(other) is None


def test_the_keys_of_every_shard(run) -> None:
    cut = with_shards(run, 4)
    keys = known(cut)
    assert all(keys.kind_of(manifests_key(cut.run_id, group)) for group in cut.groups)
    assert keys.kind_of(manifests_key(cut.run_id, "block-0.3")) is not None
    assert keys.kind_of(manifests_key(cut.run_id, "block-0.4")) is None
    assert keys.kind_of(manifests_key(cut.run_id, "block-0")) is None


def test_what_a_peer_knows_before_its_run(run) -> None:
    """Enough to look it up."""
    keys = Keys()
    assert keys.kind_of(runs_key()) is not None
    assert keys.kind_of(run_key(run.run_id)) is None
    keys.look_for(run.run_id)
    assert keys.kind_of(run_key(run.run_id)) is not None
    assert keys.kind_of(nodes_key(run.run_id, 0)) is None


def test_a_run_s_key_holds_nothing_but_the_run(run) -> None:
    kind = known(run).kind_of(run_key(run.run_id))
    assert kind is not None
    assert kind.holds(run.pack())
    assert not kind.holds(run.model_copy(update={"seed": 1}).pack())


def test_only_those_on_a_run_s_list_are_stored(run, alice, bob) -> None:
    closed = RunSpec.model_validate(run.model_dump() | {"access": [alice.peer]})
    keys = known(closed)
    for key in (nodes_key(closed.run_id, 0), manifests_key(closed.run_id, "interface")):
        kind = keys.kind_of(key)
        assert kind is not None
        assert kind.allows(alice.peer) and not kind.allows(bob.peer)
    anybody = keys.kind_of(run_key(closed.run_id))
    assert anybody is not None and anybody.allows(bob.peer)


def test_how_long_records_live(run) -> None:
    keys = known(run)
    for key, ttl in (
        (nodes_key(run.run_id, 0), NODE_TTL),
        (manifests_key(run.run_id, "interface"), manifest_ttl(run.round.period)),
    ):
        kind = keys.kind_of(key)
        assert kind is not None
        assert kind.lives(NOW + ttl + CLOCK_SLACK, NOW) and kind.lives(NOW, NOW)
        assert not kind.lives(NOW + ttl + CLOCK_SLACK + 1, NOW)
        assert not kind.lives(NOW - 1, NOW)
        assert not kind.lives(float("nan"), NOW) and not kind.lives(float("inf"), NOW)


@pytest.mark.parametrize(("shards", "authors"), [(1, 700), (16, 650), (256, 300)])
def test_hundreds_of_replicas_are_below_the_longest_answer(run, shards, authors) -> None:
    kind = known(with_shards(run, shards)).kind_of(nodes_key(with_shards(run, shards).run_id, 0))
    assert kind is not None
    assert kind.authors >= authors
    assert kind.authors * kind.record_bytes < ANSWER_BYTES < 2**22


def test_a_record_of_every_round_has_its_place() -> None:
    """For as long as it lives: each round may have another aggregator, and now and then two."""
    for period in (5.0, 10.0, 60.0, 3600.0):
        spec = RunSpec(
            name="x",
            model=ModelSpec(blocks=1, layers=1, width=8, heads=2, window=16),
            round=RoundSpec(period=period, settle=1.0),
        )
        kind = known(spec).kind_of(manifests_key(spec.run_id, "block-0"))
        assert kind is not None
        assert kind.authors > 2 * (kind.ttl + CLOCK_SLACK) / period


def test_the_largest_record_that_a_node_writes_is_taken(run) -> None:
    cut = RunSpec.model_validate(
        run.model_dump()
        | {"model": run.model.model_dump() | {"blocks": 2}, "round": run.round.model_dump() | {"shards": 256}}
    )
    version = HeldVersion(group="block-1023", version=2**40, digest=bytes(32))
    record = NodeRecord(
        run=cut.run_id, block=1, state="joining", host="h" * 255, port=65_535, device="é" * 64, started=NOW,
        round=2**40, held=[version, version], serves=2**40, accepted=2**40, late=2**40, refused=2**40,
        led=2**40, tokens_per_second=1.0, train_loss=1.0, from_noise_ce=1.0, bytes_in=2**60, bytes_out=2**60,
        sessions=2**40, hop_seconds=0.1, neighbours=[Neighbour(peer="1" * 52, seconds=0.5)] * MAX_NEIGHBOURS,
        note="é" * 200, shards=bytes(MAX_SHARDS * SHARD_BYTES),
    )  # fmt: skip
    kind = known(cut).kind_of(nodes_key(cut.run_id, 1))
    assert kind is not None
    assert len(pack(record.pack())) <= kind.record_bytes
    whole = record.model_copy(update={"shards": b""})
    assert len(pack(whole.pack())) <= NODE_BYTES
