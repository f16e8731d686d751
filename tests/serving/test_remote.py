"""Opening a chain through replicas that fail, and losing one."""

from __future__ import annotations

import asyncio

import pytest

from spheroid_node.errors import BlockWithoutReplica, ChainFailed
from spheroid_node.serving.chain import ChainLost
from spheroid_node.serving.sessions import Limits
from spheroid_node.wire.codes import ErrorCode
from spheroid_node.wire.messages import HopAddress, Result
from tests.serving.memory import DEADLINE, MakeSwarm, MemoryLink, node_record, until


async def test_a_block_without_replica_is_named(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.network.records[1].clear()
    with pytest.raises(BlockWithoutReplica, match="block 1"):
        await swarm.chain()


async def test_an_unreachable_replica_is_left_out(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.network.records[0]["ghost"] = node_record(swarm.run, 0, hop_seconds=0.0)
    swarm.network.records[0]["hop-0"] = node_record(swarm.run, 0, hop_seconds=1.0)
    chain = await swarm.chain()
    assert chain.route.hops[0].address.peer == "hop-0"
    await chain.close()


@pytest.mark.parametrize("fault", ["busy", "version gone"])
async def test_a_replica_that_refuses_is_left_out(make_swarm: MakeSwarm, fault: str) -> None:
    swarm = make_swarm()
    node = swarm.add(1, "other", Limits(sessions=0) if fault == "busy" else None)
    if fault == "version gone":
        node.models.held = (4, 7)
    swarm.network.records[1]["hop-1"] = node_record(swarm.run, 1, hop_seconds=1.0)
    chain = await swarm.chain()
    assert chain.route.hops[1].address.peer == "hop-1"
    assert (await chain.sweep(0, b"abc")).tokens
    await chain.close()
    services = [swarm.node(f"hop-{block}").service for block in range(3)]
    await until(lambda: not any(service.sessions for service in services))


async def test_a_replica_that_its_neighbour_cannot_reach_is_left_out(make_swarm: MakeSwarm) -> None:
    """It and not the neighbour, which is the only one of its block."""
    swarm = make_swarm()
    swarm.add(2, "hidden")
    swarm.network.hidden.add("hidden")
    swarm.network.records[2]["hop-2"] = node_record(swarm.run, 2, hop_seconds=1.0)
    chain = await swarm.chain()
    assert [hop.address.peer for hop in chain.route.hops] == ["hop-0", "hop-1", "hop-2"]
    await chain.close()


async def test_when_every_replica_fails_the_reason_is_told(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    await swarm.node("hop-2").vanish()
    with pytest.raises(ChainFailed, match="block 2: hop-2 is not there"):
        await swarm.chain()
    services = [swarm.node(f"hop-{block}").service for block in range(2)]
    await until(lambda: not any(service.sessions for service in services))


@pytest.mark.parametrize("block", [0, 1, 2])
async def test_a_hop_that_dies_loses_the_chain_and_is_named(make_swarm: MakeSwarm, block: int) -> None:
    swarm = make_swarm()
    chain = await swarm.chain()
    first = await chain.sweep(0, b"The castle")
    await swarm.node(f"hop-{block}").vanish()
    with pytest.raises(ChainLost) as lost:
        async with asyncio.timeout(DEADLINE):
            while True:  # what is on its way may still arrive
                await chain.sweep(first.position, first.tokens)
    assert (lost.value.block, lost.value.code) == (block, ErrorCode.NEXT_HOP_LOST)
    await chain.close()


async def test_a_connection_between_hops_that_breaks_loses_the_later_one(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    chain = await swarm.chain()
    between = next(link for link in swarm.network.dialled[3:] if link.peer == "hop-2")
    await between.close()
    await until(lambda: swarm.node("hop-1").service.sessions == 0)
    with pytest.raises(ChainLost) as lost:
        async with asyncio.timeout(DEADLINE):
            await chain.sweep(0, b"The castle")
    assert (lost.value.block, lost.value.code) == (2, ErrorCode.NEXT_HOP_LOST)
    await chain.close()


async def test_a_result_of_another_step_loses_the_chain(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    chain = await swarm.chain()
    for link in swarm.network.dialled[:3]:
        link.inbox.put_nowait(
            Result(session=bytes(16), position=1, tokens=b"x", logits=None, seconds=[0.0] * 3).pack()
        )
    with pytest.raises(ChainLost) as lost:
        await chain.sweep(0, b"a")
    assert lost.value.code in (ErrorCode.UNEXPECTED, ErrorCode.MALFORMED)
    await chain.close()


async def test_a_sweep_that_is_given_up_leaves_the_chain_in_order(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    chain = await swarm.chain()
    given_up = asyncio.create_task(chain.sweep(0, b"The castle"))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert (await chain.sweep(0, b"A river")).position == 7
    await chain.close()


async def test_a_chain_knows_how_each_of_its_links_travels(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    dial = swarm.network.dial_from_hop

    async def over_libp2p(address: HopAddress) -> MemoryLink:
        link = await dial(address)
        link.via = "libp2p" if address.peer == "hop-2" else "tcp"
        return link

    swarm.node("hop-1").service._dial = over_libp2p
    chain = await swarm.chain()
    assert chain.ways == ("tcp", "tcp", "libp2p", "tcp")
    await chain.close()
