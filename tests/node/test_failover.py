"""An aggregator that is lost before τ is replaced by the next in the ranking, within the round."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from spheroid_node.node.outbox import Outbox
from spheroid_node.node.report import Report
from spheroid_node.node.worker import Worker
from spheroid_node.rounds.election import ranking
from spheroid_node.run import RunSpec

from .conftest import Peer, World
from .test_worker import EagerTrainer, RunningClock

GROUP = "block-0"


@pytest.mark.parametrize("lost", [1, 2])
async def test_the_next_in_rank_takes_over_where_time_is_left(
    run: RunSpec, tmp_path: Path, lost: int
) -> None:
    """Four replicas; the worker's own is last in rank, and the first ones die with its update accepted."""
    timing = {"genesis": time.time(), "period": 10.0, "settle": 3.0}
    world = World(run.model_copy(update={"round": run.round.model_copy(update=timing)}))
    world.clock = cast(Any, RunningClock())
    peers = {peer.id: peer for peer in (Peer(world, 0, tmp_path / str(number)) for number in range(4))}
    for peer in peers.values():
        await peer.start()
    *leaders, own = (peers[name] for name in ranking(world.run.run_id, GROUP, 0, peers))
    collecting = {peer.id: asyncio.create_task(peer.collector.run()) for peer in peers.values()}
    trainer, report = EagerTrainer(world.run, own.groups), Report(0, "cpu")
    outbox = Outbox(world.run, tmp_path / "outbox")
    worker = Worker(
        own.client, 0, own.store, own.sync, own.submitter, cast(Any, trainer), report, outbox
    )  # fmt: skip
    working = asyncio.create_task(worker.run())
    with capture_logs() as logs:
        async with asyncio.timeout(30):
            for number, leader in enumerate(leaders[:lost]):
                while not _accepted_by(logs, leader.id):
                    assert not working.done(), working
                    await asyncio.sleep(0.01)
                collecting[leader.id].cancel()
                await leader.server.stop()
                assert own.store.newest(GROUP).version == 0, number
            while (manifest := own.store.newest(GROUP).manifest) is None:
                assert not working.done(), working
                await asyncio.sleep(0.01)
    for task in (working, *collecting.values()):
        task.cancel()
    await asyncio.gather(working, *collecting.values(), return_exceptions=True)
    await asyncio.gather(*(peer.server.stop() for peer in peers.values()))
    assert (manifest.round, manifest.rank) == (0, lost), "the next in the ranking, in the same round"
    assert [update.peer for update in manifest.updates] == [own.id]
    lost_ones = [
        entry["aggregator"]
        for entry in logs
        if entry["event"] == "round.aggregator_lost" and entry["group"] == GROUP
    ]
    assert lost_ones == [leader.id for leader in leaders[:lost]]


def _accepted_by(logs: list[Any], peer: str) -> bool:
    return any(
        entry["event"] == "round.receipt"
        and (entry["group"], entry["verdict"], entry["aggregator"]) == (GROUP, "accepted", peer)
        for entry in logs
    )
