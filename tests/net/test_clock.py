"""Whose clock counts when clocks differ."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from spheroid_node.net.clock import MAX_OFFSET, Clock, majority


class Machine:
    """A clock that can be set, beside one that cannot."""

    def __init__(self, now: float = 1e9) -> None:
        self.now = now
        self.set_by = 0.0
        self.clock = Clock(lambda: self.now + self.set_by, lambda: self.now)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.mark.parametrize(
    ("votes", "agreed"),
    [
        ([600.0], 600.0),
        ([600.1, 599.9, 600.0], 600.0),
        ([600.0, -9999.0, 600.0], 600.0),
        ([600.0, -9999.0, 9999.0, 600.0, 600.0], 600.0),
        ([0.0, 600.0], None),
        ([0.0, 0.0, 600.0, 600.0], None),
        ([0.0, 300.0, 600.0], None),
        ([0.0, 600.0, 600.0, 600.0, 0.0], 600.0),
    ],
)
def test_a_majority_that_stands_together_counts(votes: list[float], agreed: float | None) -> None:
    assert majority(votes) == agreed


def test_a_machine_that_starts_follows_the_peers_it_enters_by(machine: Machine) -> None:
    with capture_logs() as logs:
        assert machine.clock.hear([-600.2, -599.8])
        assert machine.clock.hear([-600.0, -600.1])
    assert machine.clock.time() == pytest.approx(machine.now - 600, abs=0.5)
    assert machine.clock.note == "clock 600 s fast"
    assert [(entry["event"], entry["seconds"]) for entry in logs] == [("clock.off", 600.0)], "told once"


def test_what_a_round_trip_leaves_uncertain_corrects_nothing(machine: Machine) -> None:
    machine.clock.hear([0.4, -0.7, 0.9])
    assert machine.clock.offset == 0.0 and machine.clock.note == ""


def test_one_liar_moves_nobody_whose_clock_was_confirmed(machine: Machine) -> None:
    """Not even where it is the only peer that answers; nor half of them."""
    machine.clock.hear([0.0])
    for lie in ([3600.0], [3600.0, 0.01], [3600.0, 3600.0, 0.0, 0.01]):
        machine.clock.hear(lie)
        assert machine.clock.offset == 0.0, lie


def test_a_liar_at_the_entrance_is_outvoted_later(machine: Machine) -> None:
    machine.clock.hear([3600.0])
    assert machine.clock.offset == 3600.0
    with capture_logs() as logs:
        machine.clock.hear([3600.0, 0.1, 0.0])
    assert machine.clock.offset == 0.0
    assert [entry["event"] for entry in logs] == ["clock.right"]


def test_a_clock_that_its_owner_sets_right_needs_no_correction_any_more(machine: Machine) -> None:
    machine.clock.hear([600.0])
    machine.set_by = 600.0
    assert machine.clock.has_jumped() and not machine.clock.has_jumped()
    machine.clock.hear([0.0])
    assert machine.clock.offset == 0.0


def test_a_clock_that_is_set_wrong_follows_even_a_single_peer(machine: Machine) -> None:
    machine.clock.hear([0.0])
    machine.set_by = -300.0
    assert machine.clock.has_jumped()
    machine.clock.hear([300.0])
    assert machine.clock.time() == machine.now
    machine.clock.hear([300.0 + 3600.0])  # but from now on its word counts again
    assert machine.clock.time() == machine.now


def test_peers_that_are_days_away_are_not_followed(machine: Machine) -> None:
    assert not machine.clock.hear([MAX_OFFSET + 1])
    assert machine.clock.offset == 0.0


def test_who_begins_a_swarm_is_not_led_by_the_first_to_come(machine: Machine) -> None:
    machine.clock.trust()
    machine.clock.hear([3600.0])
    assert machine.clock.offset == 0.0


def test_a_machine_with_nobody_to_ask_believes_its_own_clock(machine: Machine) -> None:
    machine.set_by = 50.0
    machine.clock.has_jumped()
    assert machine.clock.hear([])
    machine.clock.hear([3600.0])
    assert machine.clock.offset == 0.0
