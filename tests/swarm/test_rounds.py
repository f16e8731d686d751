"""Rounds of a real swarm: replicas agree, the aggregator moves, the deadline is real."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from functools import partial
from typing import Any

import pytest

from .conftest import Node, Swarm, wait_for

ROUNDS = 5


@pytest.mark.timeout(400)
def test_replicas_agree_after_every_round_and_the_aggregator_moves(swarm: Swarm) -> None:
    for group in swarm.run.groups:
        members = swarm.of_group(group)

        def common(group: str = group, members: list[Node] = members) -> list[int] | None:
            """Versions that all members have adopted."""
            adopted = [
                {event["version"] for event in node.events("round.version", group=group)} for node in members
            ]
            versions = sorted(set.intersection(*adopted))
            return versions if len(versions) >= ROUNDS else None

        versions = wait_for(f"{ROUNDS} versions of {group} on all its replicas", common)
        digests = defaultdict(set)
        for node in members:
            # The last word of a node on a version counts: of two aggregators, fork choice follows one.
            held = {event["version"]: event["digest"] for event in node.events("round.version", group=group)}
            for version in versions:
                digests[version].add(held[version])
        assert all(len(digests[version]) == 1 for version in versions), digests
        assert len({min(digests[version]) for version in versions}) == len(versions), "parameters stand still"

    leaders = defaultdict(set)
    both = 0
    for node in swarm.nodes:
        for event in node.events("round.led"):
            leaders[event["group"]].add(node.child.name)
            both += event["group"] != "interface" and event["accepted"] == 2
    assert both >= ROUNDS, "versions are not averages of both replicas"
    assert any(len(names) > 1 for names in leaders.values()), leaders


@pytest.mark.timeout(400)
def test_a_worker_past_the_deadline_is_late_and_takes_part_in_the_next_round(swarm: Swarm) -> None:
    slow, other = (node for node in swarm.nodes if node.block == 0)
    group = "block-0"
    began = stopped_in_training(slow)
    try:
        # The round closes without it: the other replica gets a version of this round, or a later one.
        closed = wait_for(
            "a version without the slow worker",
            lambda: (
                [
                    event
                    for event in other.events("round.version", group=group)
                    if event["round"] >= began["round"]
                ]
                or None
            ),
        )[0]
    finally:
        os.kill(slow.trainer_pid, signal.SIGCONT)
    assert closed["round"] == began["round"]
    led = wait_for(
        "the aggregator's account of the round",
        lambda: (
            [
                event
                for node in (slow, other)
                for event in node.events("round.led", group=group, round=began["round"])
            ]
            or None
        ),
    )[0]
    assert led["accepted"] == 1

    receipt = slow.wait_for("round.receipt", group=group, round=began["round"])
    assert (receipt["verdict"], receipt["reason"]) == ("late", "after-deadline")
    again = wait_for(
        "the slow worker's next accepted update",
        lambda: (
            [
                event
                for event in slow.events("round.receipt", group=group, verdict="accepted")
                if event["round"] > began["round"]
            ]
            or None
        ),
    )[0]
    assert again["reason"] == ""


def stopped_in_training(node: Node) -> dict[str, Any]:
    """Stop a node's trainer before it is done with a round; that round's first event."""
    while True:
        began = wait_for("the next round", partial(evaluated, node, len(node.events("round.evaluated"))))
        os.kill(node.trainer_pid, signal.SIGSTOP)
        if not node.events("round.trained", round=began["round"]):
            return began
        os.kill(node.trainer_pid, signal.SIGCONT)


def evaluated(node: Node, number: int) -> dict[str, Any] | None:
    """The event of a node that so many came before, if it has come."""
    return next(iter(node.events("round.evaluated")[number:]), None)
