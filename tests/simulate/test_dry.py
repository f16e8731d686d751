from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from spheroid_node.rounds.contribution import Contributor
from spheroid_node.run import ModelSpec, RoundSpec, RunSpec, TrainingSpec
from spheroid_node.simulate.dry import ELEMENTS, DryLearner, crowded_run, wide_run
from spheroid_node.simulate.regime import REGIMES
from spheroid_node.simulate.swarm import Swarm
from spheroid_node.training.plan import traffic as planned_traffic
from spheroid_node.training.text import Text
from spheroid_node.wire.codes import Reason, Verdict
from spheroid_node.wire.messages import MAX_UPDATES, MAX_UPDATES_NAMED, Receipt


def tiny_run() -> RunSpec:
    return RunSpec(
        name="tiny",
        model=ModelSpec(blocks=2, layers=1, width=16, heads=2, window=16),
        training=TrainingSpec(local_steps=6, batch=4),
        round=RoundSpec(genesis=1000.0, period=10.0, settle=2.0),
    )


@pytest.mark.parametrize("regime", REGIMES)
def test_a_dry_swarm_has_the_rounds_of_one_that_learns(regime: str) -> None:
    words = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 60, dtype=np.uint8)
    text = Text("foxes", words[:2000], words[2000:], "")
    reports = []
    for learnt in (text, None):
        swarm = Swarm(tiny_run(), learnt, 6, seed=2, regime=REGIMES[regime])
        reports.append(list(swarm.play(3, evaluate_every=3)))
    wet, dry = reports
    assert [replace(report, loss=None, ce=[], ce_readout=None) for report in wet] == dry
    assert wet[-1].ce
    assert dry[-1].bytes_moved or regime == "bad-edge"


def test_the_same_seed_makes_the_same_digest() -> None:
    digests = set()
    for seed in (1, 1, 2):
        swarm = Swarm(wide_run(20), None, 20, seed, REGIMES["wan"])
        list(swarm.play(2))
        digests.add(swarm.digest())
    assert len(digests) == 2


def test_every_round_of_every_worker_learns_something_else() -> None:
    updates = []
    for index in (0, 1):
        learner = DryLearner(tiny_run(), 7, index)
        for _ in range(2):
            assert learner.train(5).tokens == 5 * 4 * 16
            updates.append(learner.take("block-0"))
    correlations = np.corrcoef(updates) - np.eye(4)
    assert np.abs(correlations).max() < 0.9


def test_all_updates_of_a_wide_run_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    receipts: list[Receipt] = []
    answered = Contributor.answered

    def note(contributor: Contributor, receipt: Receipt) -> None:
        receipts.append(receipt)
        answered(contributor, receipt)

    monkeypatch.setattr(Contributor, "answered", note)
    swarm = Swarm(wide_run(150), None, 150)
    assert all(type(worker.learner) is DryLearner for worker in swarm.workers)
    list(swarm.play(2))
    assert len({receipt.update for receipt in receipts}) == len(receipts) == 300
    assert {receipt.verdict for receipt in receipts} == {Verdict.ACCEPTED}
    for version in swarm.versions.values():
        assert version.manifest is not None
        assert (version.base.version, version.manifest.accepted) == (2, 50)
        assert version.vector.shape == (ELEMENTS,)
        assert np.linalg.norm(version.vector) > 0


def test_a_round_takes_no_more_updates_than_a_manifest_has_room_for() -> None:
    one = wide_run(1).model.model_copy(update={"blocks": 1})
    swarm = Swarm(wide_run(1).model_copy(update={"model": one}), None, MAX_UPDATES + 20)
    reports = list(swarm.play(2))
    assert [(report.accepted, report.refused) for report in reports] == [(MAX_UPDATES, 20)] * 2
    manifest = swarm.versions["block-0"].manifest
    assert manifest is not None
    assert (len(manifest.updates), manifest.accepted) == (MAX_UPDATES_NAMED, MAX_UPDATES)
    assert Reason.NO_ROOM not in {update.reason for update in manifest.updates}
    # All workers that are in the version know it.
    left = [
        worker
        for worker in swarm.workers
        if worker.contributors["block-0"].settle({manifest.version: manifest})
    ]
    assert len(left) == MAX_UPDATES


@pytest.mark.parametrize(("workers", "blocks"), [(3, 3), (150, 3), (151, 4), (10_000, 200)])
def test_the_wide_run_has_room_for_all_workers(workers: int, blocks: int) -> None:
    run = wide_run(workers)
    assert run.model.blocks == blocks
    assert -(-workers // blocks) <= MAX_UPDATES_NAMED


def test_shards_share_the_traffic_of_an_aggregator() -> None:
    """Of 60 replicas of a block: more than one peer leads for."""
    busiest = {}
    for shards in (1, 8):
        swarm = Swarm(crowded_run(2, shards), None, 120)
        reports = list(swarm.play(2))
        assert [(report.participation, report.expected) for report in reports] == [(1.0, 120 * shards)] * 2
        whole = planned_traffic(swarm.run, 0)
        # The first round has the updates that a leader takes in and its own; the second fetches versions.
        if shards == 1:
            assert reports[0].busiest_bytes == 59 * whole.update
            assert reports[1].busiest_bytes >= 59 * whole.versions
        assert reports[1].bytes_moved == pytest.approx((2 * whole.update + whole.versions) * 2 * 59, rel=1e-4)
        busiest[shards] = max(report.busiest_bytes for report in reports)
    assert busiest[8] < busiest[1] / 2


def test_few_replicas_have_one_leader_of_all_shards() -> None:
    swarm = Swarm(crowded_run(2, 8), None, 20)
    list(swarm.play(1))
    for whole in swarm.run.wholes:
        assert len({swarm.chosen[group][0] for group in swarm.run.shards_of(whole)}) == 1
