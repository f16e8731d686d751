from __future__ import annotations

from functools import partial

from spheroid_node.simulate.clock import Clock


def test_actions_run_in_the_order_of_their_times_and_see_them() -> None:
    clock, seen = Clock(10.0), []

    def note(name: str) -> None:
        seen.append((clock.now, name))

    for time, name in [(12.0, "b"), (11.0, "a"), (12.0, "c"), (5.0, "past"), (20.0, "later")]:
        clock.at(time, partial(note, name))
    clock.run_until(20.0)
    assert seen == [(10.0, "past"), (11.0, "a"), (12.0, "b"), (12.0, "c")]
    assert clock.now == 20.0
    clock.run_until(20.1)
    assert seen[-1] == (20.0, "later")


def test_an_action_may_add_another() -> None:
    clock, seen = Clock(0.0), []
    clock.at(1.0, lambda: clock.at(2.0, lambda: seen.append(clock.now)))
    clock.run_until(3.0)
    assert seen == [2.0]
