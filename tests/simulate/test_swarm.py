from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spheroid_node.model.initial import initial_vector
from spheroid_node.model.parameters import flatten
from spheroid_node.rounds.election import ranking
from spheroid_node.rounds.pacing import Pace
from spheroid_node.rounds.slots import Slots
from spheroid_node.run import ModelSpec, RoundSpec, RunSpec, TrainingSpec
from spheroid_node.simulate.dry import DryLearner
from spheroid_node.simulate.regime import REGIMES, Machine, Regime
from spheroid_node.simulate.swarm import Swarm
from spheroid_node.training.local import LocalTrainer, NonFiniteLoss, TrainOutcome
from spheroid_node.training.text import Text
from spheroid_node.wire.codes import Reason, Verdict

WORKERS = 4

HALF_LATE = Regime(stall=0.5, stall_slots=0.4, stall_spread=0)
"""Whoever stalls is late by less than the settling part, and free again for the next round."""
ALL_LATE = HALF_LATE.model_copy(update={"stall": 1.0})


def tiny_run(**changes: Any) -> RunSpec:
    fields: dict[str, Any] = {
        "name": "tiny",
        "model": ModelSpec(blocks=2, layers=1, width=16, heads=2, window=16),
        "training": TrainingSpec(local_steps=6, batch=4, warmup_steps=0, learning_rate=1e-2),
        "round": RoundSpec(genesis=1000.0, period=10.0, settle=2.0),
    }
    return RunSpec(**(fields | changes))


@pytest.fixture(scope="module")
def text() -> Text:
    words = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 60, dtype=np.uint8)
    return Text("foxes", words[:2000], words[2000:], "")


def play(text: Text, rounds: int = 3, **arguments: Any) -> tuple[Swarm, list[Any]]:
    swarm = Swarm(arguments.pop("run", tiny_run()), text, WORKERS, **arguments)
    return swarm, list(swarm.play(rounds))


def test_the_same_seed_makes_the_same_model(text: Text) -> None:
    first, reports = play(text, seed=5, regime=REGIMES["wan"])
    second, again = play(text, seed=5, regime=REGIMES["wan"])
    assert reports == again
    assert first.digest() == second.digest()
    other, _ = play(text, seed=6, regime=REGIMES["wan"])
    assert other.digest() != first.digest()


def test_nothing_is_the_same_with_another_seed(text: Text) -> None:
    one, other = (Swarm(tiny_run(seed=9), text, WORKERS, seed, REGIMES["wan"]) for seed in (1, 2))
    assert {one.workers[0].peer}.isdisjoint(worker.peer for worker in other.workers)
    assert one.workers[0].machine != other.workers[0].machine
    for swarm, seed in ((one, 1), (other, 2)):
        expected = initial_vector(tiny_run(seed=seed), "block-0")
        np.testing.assert_array_equal(swarm.versions["block-0"].vector, expected)
    # Also where version 0 is all zeros, as the head is: other windows, other updates.
    same = [[worker.learner.train(1).loss for worker in swarm.workers] for swarm in (one, other)]
    assert set(same[0]).isdisjoint(same[1])


def test_in_lockstep_every_worker_makes_all_steps_of_every_round(text: Text) -> None:
    swarm, reports = play(text, rounds=4)
    assert len({worker.machine for worker in swarm.workers}) == 1
    assert [report.steps for report in reports] == [6.0] * 4
    assert [report.tokens for report in reports] == [2 * 6 * 4 * 16 * (round + 1) for round in range(4)]
    assert swarm.tokens == [reports[-1].tokens] * 2
    for version in swarm.versions.values():
        assert version.base.steps == 4 * 6


@pytest.mark.parametrize("attack", ["scaled", "nan", "stale"])
def test_what_is_plainly_wrong_is_refused_or_cut(text: Text, attack: str) -> None:
    run = tiny_run(round=RoundSpec(genesis=1000.0, period=10.0, settle=2.0, max_update_norm=50.0))
    swarm, reports = play(text, run=run, attacks={0: attack}, rounds=4)
    assert sum(report.refused for report in reports) > 0
    honest, _ = play(text, run=run, rounds=4)
    assert swarm.evaluate().ce_readout < honest.evaluate().ce_readout + 0.3  # type: ignore[union-attr]
    assert all(np.isfinite(version.vector).all() for version in swarm.versions.values())


@pytest.mark.parametrize("attack", ["flipped", "random"])
def test_a_forged_update_of_the_right_form_is_taken(text: Text, attack: str) -> None:
    swarm, reports = play(text, attacks={0: attack})
    honest, _ = play(text)
    assert all(report.refused == 0 for report in reports)
    assert swarm.digest() != honest.digest()


def test_a_screen_refuses_what_makes_the_model_worse(text: Text) -> None:
    run = tiny_run(round=RoundSpec(genesis=1000.0, period=10.0, settle=2.0, screen=0.02))
    swarm, reports = play(text, run=run, attacks={0: "flipped"}, rounds=4)
    assert sum(report.refused for report in reports) >= 4
    outcomes = [
        update
        for group in ("block-0", "interface")
        for update in swarm.versions[group].manifest.updates  # type: ignore[union-attr]
        if update.peer == swarm.workers[0].peer
    ]
    assert Reason.WORSE in {update.reason for update in outcomes}
    _, honest = play(text, run=run, rounds=4)
    assert sum(report.refused for report in honest) == 0


HALF_SPEED = Regime(speed=0.5)
"""Three of six steps fit into the training part of a slot."""


def test_with_overlap_a_slow_machine_trains_through_the_slot(text: Text) -> None:
    _, waiting = play(text, regime=HALF_SPEED, rounds=4)
    swarm, busy = play(text, regime=HALF_SPEED, rounds=4, overlap=True)
    # Slots of 10 s, τ after 8, steps of 2.7 s, of which the last must have ended by τ. The first rounds are
    # late, as a step's time is not known yet.
    assert [report.steps for report in waiting[2:]] == [2.0] * 2
    assert [report.steps for report in busy[2:]] == [4.0] * 2
    assert all(report.participation == 1 for report in busy[2:])
    assert busy[-1].tokens > waiting[-1].tokens
    for worker in swarm.workers:
        assert worker.ahead is None, "it is in the update after it"


def test_with_overlap_a_machine_that_has_time_trains_on_the_newest_version_alone(text: Text) -> None:
    swarm, waiting = play(text)
    again, busy = play(text, overlap=True)
    assert busy == waiting
    assert again.digest() == swarm.digest()


def test_every_group_gains_a_version_in_every_round(text: Text) -> None:
    swarm, reports = play(text)
    assert [report.participation for report in reports] == [1.0] * 3
    assert {group: version.base.version for group, version in swarm.versions.items()} == {
        "block-0": 3, "block-1": 3, "interface": 3,
    }  # fmt: skip
    for version in swarm.versions.values():
        assert version.manifest is not None
        assert version.manifest.round == 2
    assert len(swarm.versions["interface"].manifest.updates) == WORKERS  # type: ignore[union-attr]


def test_the_swarm_learns(text: Text) -> None:
    _, reports = play(text, rounds=6)
    assert reports[-1].ce[-1] < 3.2 < reports[0].ce[-1]


def test_the_leader_is_the_first_of_the_ranking_and_changes() -> None:
    swarm = Swarm(tiny_run(), None, WORKERS)
    leaders = []
    for report in swarm.play(5):
        leaders.append(swarm.chosen["interface"][0])
        everyone = [worker.peer for worker in swarm.workers]
        assert leaders[-1] == ranking(swarm.run.run_id, "interface", report.round, everyone)[0]
    assert len(set(leaders)) > 1


def test_whoever_stalls_is_late_and_the_round_goes_on_without_them() -> None:
    swarm = Swarm(tiny_run(), None, WORKERS, regime=HALF_LATE)
    reports = list(swarm.play(3))
    stalls = [swarm.regime.mishaps(swarm.run, 0, round, WORKERS).stall_seconds for round in range(3)]
    stalled = [int((seconds > 0).sum()) for seconds in stalls]
    assert 0 < sum(stalled) < 3 * WORKERS
    assert [report.late for report in reports] == [2 * number for number in stalled]
    assert [report.accepted for report in reports] == [2 * (WORKERS - number) for number in stalled]
    assert swarm.versions["interface"].base.version == 3


def test_what_a_late_machine_learnt_is_kept_for_its_next_update(text: Text) -> None:
    swarm = Swarm(tiny_run(), text, WORKERS, regime=HALF_LATE)
    list(swarm.play(1))
    manifest = swarm.versions["interface"].manifest
    assert manifest is not None
    contained = {update.peer for update in manifest.updates if update.verdict is Verdict.ACCEPTED}
    left = {}
    for worker in swarm.workers:
        worker.synchronise(swarm.version, False)
        left[worker.peer] = float(np.linalg.norm(worker.contributors["interface"].residual.vector))
    late = min(norm for peer, norm in left.items() if peer not in contained)
    rounding = max(norm for peer, norm in left.items() if peer in contained)
    assert late > 100 * rounding > 0


def test_a_late_machine_trains_on_from_where_it_was(text: Text) -> None:
    swarm = Swarm(tiny_run(), text, WORKERS, regime=ALL_LATE)
    list(swarm.play(2))
    for worker in swarm.workers:
        worker.synchronise(swarm.version, False)
        left = worker.contributors["interface"].residual.vector
        assert np.linalg.norm(left) > 0
        assert isinstance(worker.learner, LocalTrainer)
        begun = flatten(worker.learner.hop.interface)
        np.testing.assert_array_equal(begun, swarm.versions["interface"].vector + left)


def test_with_everyone_late_the_versions_stand(text: Text) -> None:
    swarm, reports = play(text, regime=ALL_LATE)
    assert [(report.accepted, report.late) for report in reports] == [(0, 2 * WORKERS)] * 3
    # They hear so from the header, and keep the payload.
    assert reports[-1].bytes_moved == 0
    for group, version in swarm.versions.items():
        assert version.base.version == 0
        np.testing.assert_array_equal(version.vector, initial_vector(swarm.run, group))


def test_whoever_is_away_does_nothing_and_is_waited_for() -> None:
    swarm, ranks = Swarm(tiny_run(), None, 8, seed=1, regime=Regime(away=0.4)), set()
    for report in swarm.play(4):
        away = swarm.regime.mishaps(swarm.run, 1, report.round, 8).away
        assert (report.away, report.accepted) == (away.sum(), 2 * (8 - away.sum()))
        present = {worker.peer for worker in swarm.workers if not away[worker.index]}
        # The first of the ranking that is there collects, and knows its place.
        everyone = ranking(swarm.run.run_id, "interface", report.round, [w.peer for w in swarm.workers])
        leader, manifest = swarm.chosen["interface"]
        assert leader == next(peer for peer in everyone if peer in present)
        assert manifest.rank == everyone.index(leader)
        ranks.add(manifest.rank)
        assert {update.peer for update in manifest.updates} == present
    assert max(ranks) > 0


def test_with_everyone_away_nothing_happens(text: Text) -> None:
    swarm, reports = play(text, regime=Regime(away=1.0))
    for report in reports:
        assert (report.accepted, report.late, report.steps, report.loss, report.tokens) == (0, 0, 0, None, 0)
    assert reports[-1].bytes_moved == 0
    assert swarm.digest() == Swarm(tiny_run(), text, WORKERS).digest()


def test_a_loss_that_is_not_finite_is_never_handed_in() -> None:
    class Diverging(DryLearner):
        def train(self, max_steps: int) -> TrainOutcome:
            raise NonFiniteLoss([1.0], (0, 0, 0))

    swarm = Swarm(tiny_run(), None, WORKERS)
    swarm.workers[1].learner = Diverging(swarm.run, 0, 1)
    reports = list(swarm.play(2))
    assert [(report.accepted, report.late, report.refused) for report in reports] == [(6, 0, 0)] * 2
    assert swarm.tokens[1] * 2 == swarm.tokens[0]


def test_only_what_crosses_a_link_counts_as_moved(text: Text) -> None:
    _, reports = play(text, rounds=2)
    run = tiny_run()
    sizes = {group: len(initial_vector(run, group)) for group in run.groups}
    # Round 0: version 0 is nobody's to send; in each group all but the leader send 2 bytes an element.
    sent = 2 * (sizes["block-0"] + sizes["block-1"] + 3 * sizes["interface"])
    assert reports[0].bytes_moved == sent
    # Round 1: all but the leaders fetch 4 bytes an element, and so do those who keep a copy of another block.
    fetched = 4 * (sizes["block-0"] + sizes["block-1"] + 3 * sizes["interface"])
    copied = [group for worker in range(WORKERS) for group in run.copied_groups(worker % 2)]
    assert copied.count("block-0") == 2
    fetched += 4 * sum(sizes[group] for group in copied)
    assert reports[1].bytes_moved == 2 * sent + fetched


def test_every_byte_has_a_sender_and_a_receiver() -> None:
    swarm = Swarm(tiny_run(), None, WORKERS, regime=REGIMES["mild"])
    reports = list(swarm.play(3))
    assert sum(swarm.bytes_by_worker) == 2 * reports[-1].bytes_moved
    assert min(swarm.bytes_by_worker) > 0


def test_a_slow_machine_trains_less_instead_of_not_at_all() -> None:
    swarm = Swarm(tiny_run(), None, WORKERS)
    swarm.workers[0].machine = Machine(step_seconds=2.0)
    first, second = swarm.play(2)
    # How long its steps take it must measure first, and that costs it a round.
    assert (first.late, second.late, second.participation) == (2, 0, 1.0)
    manifest = swarm.versions["interface"].manifest
    assert manifest is not None
    tokens = {update.peer: update.tokens for update in manifest.updates}
    assert 0 < tokens[swarm.workers[0].peer] < max(tokens.values())


def test_a_machine_whose_link_was_slow_once_comes_back() -> None:
    swarm = Swarm(tiny_run(), None, WORKERS)
    swarm.workers[0].pace.upload_seconds = 8.0  # of the 8 s that a slot leaves
    reports = list(swarm.play(8))
    # It hands in a single step, and finds that its link is not that slow.
    assert [report.steps for report in reports][::7] == [(3 * 6 + 1) / 4, 6.0]
    assert [report.participation for report in reports] == [1.0] * 8


def test_steps_are_those_that_fit_before_the_deadline() -> None:
    worker = Swarm(tiny_run(), None, WORKERS).workers[0]
    worker.machine = Machine(step_seconds=1.5)
    slots = Slots.of(tiny_run().round)
    start = slots.start(3)
    worker.pace = Pace(upload_seconds=1.0, step_seconds=1.5)
    assert worker.steps(slots, 3, start, 6) == 3  # the last begins before 8 − 2·1 − 1.5 s
    assert worker.steps(slots, 3, start - 30, 6) == 6  # as many as the run allows
    assert worker.steps(slots, 3, start + 4.6, 6) == 0
    worker.pace = Pace(upload_seconds=4.0)
    assert worker.steps(slots, 3, start, 6) == 1  # not even an empty slot would do


def test_play_goes_on_where_it_ended(text: Text) -> None:
    whole, expected = play(text, rounds=3)
    parts = Swarm(tiny_run(), text, WORKERS)
    reports = [*parts.play(1), *parts.play(2)]
    assert reports == expected
    assert parts.digest() == whole.digest()


def test_measured_only_when_wanted(text: Text) -> None:
    swarm = Swarm(tiny_run(), text, WORKERS, evaluation_windows=3)
    _, expected = play(text, rounds=5)
    reports = list(swarm.play(5, evaluate_every=2))
    assert [bool(report.ce) for report in reports] == [False, True, False, True, True]
    assert [report.ce_readout is None for report in reports] == [True, False, True, False, False]
    measured = swarm.evaluate()
    assert measured is not None
    assert (measured.bytes, measured.ce) == (3 * 16, reports[-1].ce)
    assert [report.loss for report in reports] == [report.loss for report in expected]


@pytest.mark.parametrize("learning", [{"conditioning": "context"}, {"denoiser": "edm", "readout": "mean"}])
def test_other_kinds_of_run_play_too(text: Text, learning: dict[str, str]) -> None:
    swarm, reports = play(text, rounds=1, run=tiny_run(learning=learning, interface="frozen"))
    assert reports[0].participation == 1.0
    assert set(swarm.versions) == {"block-0", "block-1"}


def test_a_block_without_a_worker_is_an_error(text: Text) -> None:
    with pytest.raises(ValueError, match="2 blocks"):
        Swarm(tiny_run(), text, 1)


def test_a_chain_is_put_together_of_versions_that_belong_together(text: Text) -> None:
    run = tiny_run(model=ModelSpec(blocks=3, layers=1, width=16, heads=2, window=16))
    swarm = Swarm(run, text, 3)
    loaded: dict[str, bytes] = {}
    last = swarm.workers[2]
    load = last.learner.load

    def note(group: str, version: int, steps: int, vector: np.ndarray[Any, Any], *more: Any) -> None:
        loaded[group] = vector.tobytes()
        load(group, version, steps, vector, *more)

    last.learner.load = note  # type: ignore[method-assign]
    list(swarm.play(5))
    # What the last block's newest version was trained on is what it is put together with.
    model = swarm.model()
    assert (
        flatten(model.blocks[0]).tobytes()
        == loaded["block-0"]
        == swarm.version("block-0", 2).vector.tobytes()
    )
    assert (
        flatten(model.blocks[1]).tobytes()
        == loaded["block-1"]
        == swarm.version("block-1", 1).vector.tobytes()
    )
    assert flatten(model.blocks[2]).tobytes() == swarm.version("block-2").vector.tobytes()
    assert swarm.version("block-0", 2).base.version == 3
    assert swarm.version("block-0", 99).base.version == 2  # no more are kept than may be needed


@pytest.mark.parametrize("learning", [{}, {"staggered": False}, {"conditioning": "context"}])
def test_the_versions_that_belong_together_make_the_model(text: Text, learning: dict[str, Any]) -> None:
    swarm, _ = play(text, run=tiny_run(learning=learning, interface="frozen"))
    parts = swarm.together()
    lagging = 1 if not learning else 0
    assert {group: part.base.version for group, part in parts.items()} == {
        "block-0": 3 - lagging, "block-1": 3
    }  # fmt: skip
    for block, part in enumerate(parts.values()):
        np.testing.assert_array_equal(flatten(swarm.model().blocks[block]), part.vector)


@pytest.mark.parametrize("above", [50, 1])
def test_in_shards_a_swarm_learns_the_same(text: Text, above: int) -> None:
    """Where all workers are heard and no update is clipped, whoever leads which shard."""
    run = tiny_run()
    models = []
    for shards in (1, 5):
        rule = {"shards": shards, "shard_above": above, "aggregation": "mean"}
        cut = run.model_copy(update={"round": run.round.model_copy(update=rule)})
        swarm = Swarm(cut, text, 6, seed=5)
        reports = list(swarm.play(3, evaluate_every=3))
        assert {report.participation for report in reports} == {1.0}
        leaders = {swarm.chosen[group][0] for group in cut.shards_of("block-0")}
        assert len(leaders) == 1 or (shards, above) == (5, 1)
        models.append((swarm.digest(), reports[-1].ce, reports[-1].bytes_moved))
    assert models[0] == models[1]
