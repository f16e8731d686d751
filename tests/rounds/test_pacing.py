from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.rounds.pacing import UPLOAD_MARGIN, Pace, stop_training_at
from spheroid_node.rounds.slots import Slots

SLOTS = Slots(genesis=1000.0, period=60.0, settle=8.0)
seconds = st.floats(0, 200)


@given(st.integers(0, 1000), seconds, seconds)
def test_the_last_step_and_a_slow_upload_end_before_the_deadline(
    round: int, upload: float, step: float
) -> None:
    stop = stop_training_at(SLOTS, round, upload, step)
    assert stop >= SLOTS.start(round)
    if stop > SLOTS.start(round):
        assert stop + step + UPLOAD_MARGIN * upload <= SLOTS.deadline(round) + 1e-6


@given(seconds, seconds, seconds)
def test_a_slower_machine_never_trains_longer(upload: float, step: float, more: float) -> None:
    stop = stop_training_at(SLOTS, 3, upload, step)
    assert stop_training_at(SLOTS, 3, upload + more, step) <= stop
    assert stop_training_at(SLOTS, 3, upload, step + more) <= stop


def test_a_slow_upload_counts_at_once_and_is_forgotten_slowly() -> None:
    pace = Pace(upload_seconds=1.0, step_seconds=0.1)
    pace.uploaded(5.0)
    assert pace.upload_seconds == 5.0
    pace.uploaded(1.0)
    assert 1.0 < pace.upload_seconds < 5.0
    assert pace.stop_at(SLOTS, 2) == stop_training_at(SLOTS, 2, pace.upload_seconds, pace.step_seconds)


def test_one_long_upload_does_not_keep_a_machine_out_for_ever() -> None:
    pace = Pace(upload_seconds=1.0, step_seconds=0.1)
    pace.uploaded(40.0)
    assert pace.stop_at(SLOTS, 0) == SLOTS.start(0)
    for _ in range(3):
        pace.skipped()
    assert pace.stop_at(SLOTS, 0) > SLOTS.start(0)


def test_an_update_that_nobody_took_counts_as_long_as_it_was_tried() -> None:
    pace = Pace(upload_seconds=1.0, step_seconds=0.1)
    pace.not_delivered(40.0, SLOTS)
    assert pace.upload_seconds == 40.0 and not pace.can_keep_up(SLOTS)
    pace.not_delivered(2.0, SLOTS)
    assert pace.upload_seconds == 40.0, "at least"
    pace.not_delivered(900.0, SLOTS)
    assert pace.upload_seconds == SLOTS.period


def test_the_first_measured_step_replaces_the_guess() -> None:
    pace = Pace()
    pace.stepped(0.4)
    assert pace.step_seconds == 0.4
    pace.stepped(0.2)
    assert pace.step_seconds == pytest.approx(0.35)


def test_a_machine_that_cannot_keep_up_knows_what_it_needs() -> None:
    assert Pace(upload_seconds=20.0, step_seconds=10.0).can_keep_up(SLOTS)
    slow = Pace(upload_seconds=25.0, step_seconds=10.0)
    assert not slow.can_keep_up(SLOTS)
    assert slow.needed() == 60.0
