"""Which nodes are measured, and when what was measured is published."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from spheroid_node.node import neighbours
from spheroid_node.node.neighbours import Neighbours
from spheroid_node.node.report import Report
from spheroid_node.run import ModelSpec, RunSpec
from spheroid_node.wire.messages import HopAddress
from spheroid_node.wire.records import MAX_NEIGHBOURS, NodeRecord
from tests.serving.memory import node_record

RUN = RunSpec(name="test", model=ModelSpec(blocks=3, layers=1, width=8, heads=2, window=8))


@dataclass
class FakeClient:
    """A directory of nodes by block, and how far they are."""

    records: dict[int, dict[str, NodeRecord]]
    distances: dict[str, float] = field(default_factory=dict)
    run: RunSpec = RUN

    @property
    def directory(self) -> FakeClient:
        return self

    @property
    def identity(self) -> Any:
        return type("Identity", (), {"peer": "own"})

    async def nodes(self, block: int) -> dict[str, NodeRecord]:
        return self.records.get(block, {})

    async def measure(self, addresses: Iterable[HopAddress]) -> dict[str, float]:
        peers = [address.peer for address in addresses]
        return {peer: self.distances[peer] for peer in peers if peer in self.distances}


def measuring(monkeypatch: pytest.MonkeyPatch, block: int, client: FakeClient) -> tuple[Neighbours, Report]:
    monkeypatch.setattr(neighbours, "measure_distances", client.measure)
    report = Report(block, "cpu")
    return Neighbours(client, report), report  # type: ignore[arg-type]


def told(report: Report) -> dict[str, float]:
    return {neighbour.peer: neighbour.seconds for neighbour in report.neighbours}


@pytest.mark.parametrize(("block", "after"), [(0, 1), (1, 2), (2, 0)])
async def test_the_next_block_is_measured_and_from_the_last_the_first(
    monkeypatch: pytest.MonkeyPatch, block: int, after: int
) -> None:
    records = {number: {f"of {number}": node_record(RUN, number)} for number in range(3)}
    records[after]["own"] = records[after]["silent"] = node_record(RUN, after)
    client = FakeClient(records, {f"of {number}": 0.01 for number in range(3)} | {"own": 0.0})
    measurer, report = measuring(monkeypatch, block, client)
    await measurer.measure()
    assert told(report) == {f"of {after}": 0.01}
    assert report.changed.is_set()


async def test_small_changes_are_smoothed_and_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient({1: {"a": node_record(RUN, 1)}}, {"a": 0.1})
    measurer, report = measuring(monkeypatch, 0, client)
    await measurer.measure()
    report.changed.clear()
    client.distances["a"] = 0.12
    await measurer.measure()
    assert told(report) == {"a": 0.1} and not report.changed.is_set()
    client.distances["a"] = 1.0
    await measurer.measure()
    assert 0.1 < told(report)["a"] < 1.0 and report.changed.is_set()


async def test_a_record_names_no_more_than_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = [f"peer {number}" for number in range(3 * MAX_NEIGHBOURS)]
    client = FakeClient({1: {peer: node_record(RUN, 1) for peer in peers}}, dict.fromkeys(peers, 0.1))
    measurer, report = measuring(monkeypatch, 0, client)
    for _ in range(5):
        await measurer.measure()
    assert len(report.neighbours) == MAX_NEIGHBOURS


async def test_a_directory_that_fails_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient({1: {"a": node_record(RUN, 1)}}, {"a": 0.1})
    failures = [TimeoutError("no answer")]
    nodes = client.nodes

    async def failing(block: int) -> dict[str, NodeRecord]:
        if failures:
            raise failures.pop()
        return await nodes(block)

    client.nodes = failing  # type: ignore[method-assign]
    monkeypatch.setattr(neighbours, "FIRST", 0.0)
    monkeypatch.setattr(neighbours, "PERIOD", 0.0)
    measurer, report = measuring(monkeypatch, 0, client)
    running = asyncio.create_task(measurer.run())
    async with asyncio.timeout(20):
        await report.changed.wait()
    running.cancel()
    assert told(report) == {"a": 0.1}
