from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spheroid_node.model.initial import initial_vector
from spheroid_node.model.parameters import flatten
from spheroid_node.rounds.election import ranking
from spheroid_node.rounds.slots import Slots
from spheroid_node.run import ModelSpec, RoundSpec, RunSpec, TrainingSpec
from spheroid_node.simulate.swarm import Swarm
from spheroid_node.simulate.worker import BYTES_PER_SECOND, Machine
from spheroid_node.training.text import Text

WORKERS = 4


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
    first, reports = play(text, seed=5, slow=0.25)
    second, again = play(text, seed=5, slow=0.25)
    assert reports == again
    assert first.digest() == second.digest()
    other, _ = play(text, seed=6, slow=0.25)
    assert other.digest() != first.digest()


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


def test_the_leader_is_the_first_of_the_ranking_and_changes(text: Text) -> None:
    swarm = Swarm(tiny_run(), text, WORKERS)
    leaders = []
    for report in swarm.play(5):
        leaders.append(swarm.chosen["interface"][0])
        everyone = [worker.peer for worker in swarm.workers]
        assert leaders[-1] == ranking(swarm.run.run_id, "interface", report.round, everyone)[0]
    assert len(set(leaders)) > 1


def test_slow_machines_are_late_and_the_round_goes_on_without_them(text: Text) -> None:
    swarm, reports = play(text, slow=0.5)
    expected = WORKERS * 2
    assert [(report.accepted, report.late) for report in reports] == [(expected // 2, expected // 2)] * 3
    assert swarm.versions["interface"].base.version == 3


def test_what_a_late_machine_learnt_is_kept_for_its_next_update(text: Text) -> None:
    swarm = Swarm(tiny_run(), text, WORKERS, slow=0.5)
    list(swarm.play(1))
    manifest = swarm.versions["interface"].manifest
    assert manifest is not None
    contained = {update.peer for update in manifest.updates}
    left = {}
    for worker in swarm.workers:
        worker.synchronise(swarm.versions)
        left[worker.peer] = float(np.linalg.norm(worker.contributors["interface"].residual.vector))
    assert len(contained) == WORKERS // 2
    late = min(norm for peer, norm in left.items() if peer not in contained)
    rounding = max(norm for peer, norm in left.items() if peer in contained)
    assert late > 100 * rounding > 0


def test_a_late_machine_trains_on_from_where_it_was(text: Text) -> None:
    swarm = Swarm(tiny_run(), text, WORKERS, slow=1.0)
    list(swarm.play(2))
    for worker in swarm.workers:
        worker.synchronise(swarm.versions)
        left = worker.contributors["interface"].residual.vector
        assert np.linalg.norm(left) > 0
        begun = flatten(worker.trainer.hop.interface)
        np.testing.assert_array_equal(begun, swarm.versions["interface"].vector + left)


def test_with_everyone_late_the_versions_stand(text: Text) -> None:
    swarm, reports = play(text, slow=1.0)
    assert [report.accepted for report in reports] == [0, 0, 0]
    for group, version in swarm.versions.items():
        assert version.base.version == 0
        np.testing.assert_array_equal(version.vector, initial_vector(swarm.run, group))


def test_only_what_crosses_a_link_counts_as_moved(text: Text) -> None:
    _, reports = play(text, rounds=2)
    run = tiny_run()
    sizes = {group: len(initial_vector(run, group)) for group in run.groups}
    # Round 0: version 0 is nobody's to send; in each group all but the leader send 2 bytes an element.
    sent = 2 * (sizes["block-0"] + sizes["block-1"] + 3 * sizes["interface"])
    assert reports[0].bytes_moved == sent
    # Round 1: all but the leaders fetch 4 bytes an element, and block 1's workers their upstream block.
    fetched = 4 * (sizes["block-0"] + sizes["block-1"] + 3 * sizes["interface"] + 2 * sizes["block-0"])
    assert reports[1].bytes_moved == 2 * sent + fetched


def test_a_slow_machine_trains_less_instead_of_not_at_all(text: Text) -> None:
    swarm = Swarm(tiny_run(), text, WORKERS)
    swarm.workers[0].machine = Machine(step_seconds=2.0, bytes_per_second=BYTES_PER_SECOND)
    first, second = swarm.play(2)
    # How long its steps take it must measure first, and that costs it a round.
    assert (first.late, second.late, second.participation) == (2, 0, 1.0)
    manifest = swarm.versions["interface"].manifest
    assert manifest is not None
    tokens = {update.peer: update.tokens for update in manifest.updates}
    assert 0 < tokens[swarm.workers[0].peer] < max(tokens.values())


def test_a_machine_that_cannot_make_one_step_in_a_slot_stays_out_for_a_while(text: Text) -> None:
    swarm = Swarm(tiny_run(), text, WORKERS)
    swarm.workers[0].pace.upload_seconds = 6.0  # of the 8 s that a slot leaves, and it counts double
    reports = list(swarm.play(4))
    # It hopes a little more in every round, and finds that its link is not that slow.
    assert [report.expected - report.accepted for report in reports] == [2, 2, 0, 0]
    assert swarm.versions["block-0"].base.version == 4


@pytest.mark.parametrize("learning", [{"conditioning": "context"}, {"denoiser": "edm", "readout": "mean"}])
def test_other_kinds_of_run_play_too(text: Text, learning: dict[str, str]) -> None:
    swarm, reports = play(text, rounds=1, run=tiny_run(learning=learning, interface="frozen"))
    assert reports[0].participation == 1.0
    assert set(swarm.versions) == {"block-0", "block-1"}


def test_a_block_without_a_worker_is_an_error(text: Text) -> None:
    with pytest.raises(ValueError, match="2 blocks"):
        Swarm(tiny_run(), text, 1)


def test_the_fastest_machines_are_a_few_times_as_fast_as_the_slowest() -> None:
    run = tiny_run()
    speeds = [Machine.draw(run, seed=1, index=index).step_seconds for index in range(300)]
    slots = Slots.of(run.round)
    fitting = (slots.deadline(0) - slots.start(0)) / run.training.local_steps
    assert 0.55 < float(np.median(speeds)) / fitting < 0.8
    assert 2 < np.quantile(speeds, 0.95) / np.quantile(speeds, 0.05) < 8
