"""Writing by speculation says what one byte a sweep would, whatever is drafted and however it travels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from spheroid_node.serving.chain import Chain, ChainLost
from spheroid_node.serving.decoders import autoregressive, speculative
from spheroid_node.serving.finding import write_on
from spheroid_node.serving.judging import Judge
from spheroid_node.serving.local import LocalChain
from spheroid_node.serving.pace import Pace
from spheroid_node.serving.remote import Generation
from spheroid_node.serving.sessions import Inbox, Limits
from spheroid_node.serving.stats import Measure
from spheroid_node.serving.steps import Piece
from spheroid_node.wire.codes import ErrorCode
from spheroid_node.wire.messages import MAX_DRAFTS, HopAddress, Result, State, Write
from spheroid_node.wire.tensors import pack_tensor
from tests.serving.memory import DEADLINE, MakeSwarm, MemoryLink, small_model, until

PROMPT = b"The castle was o"
COUNT = 60
RECIPES = [
    {},
    {"denoiser": "edm", "conditioning": "context"},
    {"readout": "mean"},
    {"denoiser": "edm", "readout": "mean"},
]


async def byte_by_byte(chain: Chain, prompt: bytes = PROMPT, count: int = COUNT) -> bytes:
    async with asyncio.timeout(DEADLINE):
        return b"".join([part async for part in autoregressive(chain, prompt, count)])


async def written(chain: Chain, drafts: int = 0, prompt: bytes = PROMPT, count: int = COUNT) -> bytes:
    async with asyncio.timeout(DEADLINE):
        return b"".join([sweep.tokens async for sweep in chain.write(0, prompt, count, drafts)])


# --- the text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("learning", RECIPES, ids=str)
@pytest.mark.parametrize(("seed", "temperature"), [(0, 0.0), (3, 0.5), (2**63 - 1, 1.3)])
@pytest.mark.parametrize("drafts", [1, 7, 0])
async def test_it_is_that_of_one_byte_a_sweep(
    make_swarm: MakeSwarm, learning: dict[str, str], seed: int, temperature: float, drafts: int
) -> None:
    model = small_model(**learning)
    expected = await byte_by_byte(LocalChain(model, seed, temperature))
    assert await written(LocalChain(model, seed, temperature), drafts) == expected
    chain = await make_swarm(model).chain(seed, temperature)
    assert await written(chain, drafts) == expected
    await chain.close()


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 40])
async def test_any_number_of_blocks_and_bytes(make_swarm: MakeSwarm, blocks: int, count: int) -> None:
    swarm = make_swarm(small_model(blocks=blocks))
    expected = await byte_by_byte(LocalChain(swarm.model, 1, 0.7), count=count)
    chain = await swarm.chain(1, 0.7)
    assert await written(chain, count=count) == expected
    # And again in the same session, from an earlier place on.
    assert await written(chain, count=count) == expected
    assert await byte_by_byte(chain, count=count) == expected
    await chain.close()


@pytest.mark.parametrize("learning", RECIPES, ids=str)
@pytest.mark.parametrize(("seed", "temperature"), [(0, 0.0), (3, 0.5)])
@pytest.mark.parametrize(("drafts", "branches"), [(1, 1), (6, 3)])
async def test_branches_do_not_show_in_the_text(
    make_swarm: MakeSwarm,
    learning: dict[str, str],
    seed: int,
    temperature: float,
    drafts: int,
    branches: int,
) -> None:
    swarm = make_swarm(small_model(**learning))
    expected = await byte_by_byte(LocalChain(swarm.model, seed, temperature))
    chain = await swarm.chain(seed, temperature)
    async with asyncio.timeout(DEADLINE):
        found = [sweep.tokens async for sweep in chain.write(0, PROMPT, COUNT, drafts, branches)]
    assert b"".join(found) == expected
    assert await byte_by_byte(chain) == expected  # nor in the caches
    await chain.close()


async def test_states_of_eight_bits(make_swarm: MakeSwarm) -> None:
    model = small_model(states="int8")
    expected = await byte_by_byte(LocalChain(model, 3, 0.5))
    chain = await make_swarm(model).chain(3, 0.5)
    assert await written(chain) == expected
    await chain.close()
    logits = [
        (await LocalChain(small_model(states=states), 3, logits=True).sweep(0, PROMPT)).logits
        for states in ("fp16", "int8")
    ]
    assert logits[0] is not None and logits[1] is not None
    assert 1e-3 < np.abs(logits[0] - logits[1]).max() < 1


async def test_a_prompt_of_many_steps(make_swarm: MakeSwarm) -> None:
    """Longer than a step, than what may wait, and than what a cache keeps."""
    swarm = make_swarm(limits=Limits(waiting=2))
    prompt = bytes(range(32, 127)) * 8
    expected = await byte_by_byte(LocalChain(swarm.model, 2, 0.8), prompt, 30)
    chain = await swarm.chain(2, 0.8)
    assert await written(chain, prompt=prompt, count=30) == expected
    await chain.close()


async def test_logits_are_those_of_the_decided_bytes(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    chain = await swarm.chain(logits=True)
    found = [sweep async for sweep in chain.write(0, PROMPT, COUNT)]
    for sweep in found:
        assert sweep.logits is not None and sweep.logits.shape == (len(sweep.tokens), 256)
        assert bytes(sweep.logits.argmax(-1).tolist()) == sweep.tokens
    await chain.close()


async def test_drafts_that_hold_save_sweeps(make_swarm: MakeSwarm) -> None:
    """Blocks that all say the same: every draft holds, and one line is all there is."""
    model = small_model(conditioning="context")
    for block in (1, 2):
        model.blocks[block].load_state_dict(model.blocks[0].state_dict())
    swarm = make_swarm(model)
    measure = Measure()
    chain = await swarm.chain(4, 0.9)
    assert await written(measure.chain(chain)) == await byte_by_byte(LocalChain(model, 4, 0.9))
    assert measure.stats.sweeps == 1
    await chain.close()


async def test_texts_that_are_written_at_once_are_computed_together(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    prompts = [bytes([65 + number]) * (number + 1) for number in range(12)]
    expected = [await byte_by_byte(LocalChain(swarm.model, 5, 0.9), prompt, 25) for prompt in prompts]
    chains = await asyncio.gather(*(swarm.chain(5, 0.9) for _ in prompts))
    together = []
    engine = swarm.node("hop-1").service._engine
    compute = engine._compute
    engine._compute = lambda batch: together.append(len(batch)) or compute(batch)  # type: ignore[method-assign,func-returns-value]
    texts = (written(chain, prompt=prompt, count=25) for chain, prompt in zip(chains, prompts, strict=True))
    assert await asyncio.gather(*texts) == expected
    assert max(together) > 2
    await asyncio.gather(*(chain.close() for chain in chains))


# --- judging ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.data())
def test_the_judge_lets_through_what_the_chain_would_decide(truth: list[int], data: st.DataObject) -> None:
    """Against the rule itself: the chain decides ``truth`` at a place where all before it is true."""
    judge, text = Judge(), bytearray(b"?")
    judge.judge(Piece(0, b"?"), bytes([truth[0]]))
    text.append(truth[0])
    line = 0
    while len(text) <= len(truth):
        # A line of drafts from the last final byte on, in pieces, right or wrong by chance.
        start = len(text) - 1
        size = data.draw(st.integers(1, len(truth) - start))
        guesses = bytes(data.draw(st.integers(0, 2)) for _ in range(size - 1))
        tokens, found, failed = bytes(text[-1:]) + guesses, b"", False
        while tokens:
            cut = data.draw(st.integers(1, len(tokens)))
            piece, tokens = Piece(start, tokens[:cut], decide=cut, line=line), tokens[cut:]
            start += cut
            assert judge.due(piece) is not failed
            if failed:
                continue
            final = judge.judge(piece, bytes(truth[piece.position : piece.end]))
            found += final
            failed = piece.end - piece.position > len(final) or (tokens[:1] != final[-1:] and bool(tokens))
        assert found and found == bytes(truth[len(text) - 1 : len(text) - 1 + len(found)])
        text += found
        line += 1
    assert bytes(text[1:]) == bytes(truth)


def judged(judge: Judge, truth: bytes, piece: Piece) -> bytes | None:
    """What is final after ``piece`` where the chain decides ``truth``; None if it is not due."""
    return judge.judge(piece, truth[piece.position : piece.end]) if judge.due(piece) else None


def test_a_line_goes_on_with_the_branch_that_begins_with_what_was_decided() -> None:
    """The byte after position p of the truth is truth[p]."""
    judge, truth = Judge(), b"abcdefgh"
    judge.judge(Piece(0, b"?"), truth[:1])
    assert judged(judge, truth, Piece(1, b"abX", decide=3, line=0)) == b"bc"
    assert judged(judge, truth, Piece(4, b"de", decide=2, line=0)) is None  # of the trunk, past its failure
    assert judged(judge, truth, Piece(3, b"Yd", decide=2, line=0, branch=1)) is None
    assert judged(judge, truth, Piece(3, b"cd", decide=2, line=0, branch=2)) == b"de"
    # What has the right byte at the right place, but states that know of another byte before it.
    assert judged(judge, truth, Piece(5, b"ef", decide=2, line=0)) is None
    assert judged(judge, truth, Piece(5, b"ef", decide=2, line=0, branch=3)) is None
    assert judged(judge, truth, Piece(5, b"ef", decide=0, line=0, branch=2, after=2)) is None
    assert judged(judge, truth, Piece(5, b"e", line=0, branch=2, after=2)) == b"f"
    # A branch of that branch, then a new line.
    assert judged(judge, truth, Piece(6, b"f", line=0, branch=4, after=2)) == b"g"
    assert judged(judge, truth, Piece(7, b"g", line=0, branch=2, after=2)) is None
    assert judged(judge, truth, Piece(7, b"g", line=1)) == b"h"
    judge.judge(Piece(0, b"?"), truth[:1])  # another text of the same session
    assert judged(judge, truth, Piece(1, b"a", line=0)) == b"b"


async def test_a_line_that_begins_anew_makes_waiting_ones_pointless() -> None:
    inbox, zeros = Inbox(8), pack_tensor(np.zeros((2, 1)))

    def state(position: int, line: int, branch: int = 0, decide: int = 2) -> State:
        return State(
            session=bytes(16), position=position, tokens=b"ab", masked=0, decide=decide, line=line,
            branch=branch, hidden=zeros, noisy=zeros, log_probs=None, seconds=[],
        )  # fmt: skip

    for position in (3, 5, 7):
        await inbox.put(state(position, 0))
    await inbox.put(state(6, 1))
    assert [(await inbox.get()).position for _ in range(3)] == [3, 5, 6]
    for one in (state(9, 2), state(7, 2, branch=1), state(4, 2, decide=0), state(6, 2)):
        await inbox.put(one)  # what is of one line leaves the rest of it alone
    assert [(await inbox.get()).position for _ in range(4)] == [9, 7, 4, 6]


# --- pace -------------------------------------------------------------------------------------------


def test_a_good_drafter_goes_further_ahead() -> None:
    good, bad = Pace(), Pace()
    for _ in range(200):
        good.judged(9, True)
        bad.judged(0, True)
    assert bad.acceptance < 0.1 < 0.85 < good.acceptance < 0.95
    assert 1 <= bad.depth <= 2 and 15 <= good.depth <= MAX_DRAFTS


def test_pieces_are_as_long_as_the_slowest_hop_needs() -> None:
    pace = Pace()
    assert pace.piece == 1
    for _ in range(100):
        pace.drafted(0.002)
        pace.swept([0.001, 0.007])
    assert pace.piece == 4
    for _ in range(100):
        pace.swept([0.001, 0.001])
    assert pace.piece == 1


def test_branches_are_for_the_time_that_is_spent_waiting() -> None:
    pace = Pace()
    assert pace.branches == 0
    for _ in range(100):
        pace.drafted(0.001)
        pace.waited(0.030)
    assert pace.branches == 3
    for _ in range(100):
        pace.waited(1.0)
    assert pace.branches == 8
    for _ in range(100):
        pace.waited(0.004)
    assert pace.branches == 0


# --- a hop that dies --------------------------------------------------------------------------------


Kill = Callable[[int], bool]


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 17, COUNT - 1])
@pytest.mark.parametrize("decoder", ["speculative", "autoregressive"])
async def test_another_replica_goes_on_and_the_text_does_not_show_it(
    make_swarm: MakeSwarm, block: int, after: int, decoder: str
) -> None:
    swarm = make_swarm()
    expected = await byte_by_byte(LocalChain(swarm.model, 6, 0.8))
    for spare in range(3):
        swarm.add(spare, f"spare-{spare}", hop_seconds=1.0)
    finder = swarm.finder(Generation(6, 0.8))
    text = b""
    async with asyncio.timeout(DEADLINE):
        async for decided in write_on(finder, decoder, swarm.run, PROMPT, COUNT):  # type: ignore[arg-type]
            text += decided
            if len(text) > after and f"hop-{block}" in swarm.network.nodes:
                await swarm.node(f"hop-{block}").vanish()
    assert text == expected
    assert finder.found == 2 or after == COUNT - 1
    await until(lambda: not any(node.service.sessions for node in swarm.network.nodes.values()))


async def test_without_another_replica_it_waits_until_there_is_one(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    expected = await byte_by_byte(LocalChain(swarm.model, 6, 0.8))
    reasons: list[str] = []

    def waiting(reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == 3:
            swarm.add(1, "late")

    text = b""
    async with asyncio.timeout(DEADLINE):
        finder = swarm.finder(Generation(6, 0.8), waiting=waiting)
        async for decided in write_on(finder, "speculative", swarm.run, PROMPT, COUNT):
            text += decided
            if "hop-1" in swarm.network.nodes:
                await swarm.node("hop-1").vanish()
                swarm.network.records[1].clear()
    assert text == expected and len(reasons) >= 3
    assert "block 1" in reasons[0]


async def test_a_session_keeps_its_versions_while_a_replica_holds_them(make_swarm: MakeSwarm) -> None:
    """The others have gone on to a newer version, and say so; they still hold the one before."""
    from tests.serving.memory import held

    swarm = make_swarm()
    finder = swarm.finder(Generation())
    first = await finder.open()
    for block in range(3):
        newer = [held(f"block-{block}", 4), held("interface", 8)]
        swarm.add(block, f"newer-{block}", held=newer)
        swarm.network.records[block].pop(f"hop-{block}")
    finder.lost(first, ChainLost(1, ErrorCode.NEXT_HOP_LOST))
    second = await finder.open()
    assert second.route.versions == first.route.versions == finder.versions
    for block in range(3):
        swarm.node(f"newer-{block}").models.held = (4, 8)  # and now they hold it no longer
    third = await finder.open()
    assert third.route.versions.interface == 8 and third.route.versions.blocks == (4, 4, 4)
    for chain in (first, second, third):
        await chain.close()


# --- what a hop makes of a hop that lies ------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"position": 99}, {"tokens": b"x" * 61}, {"session": bytes(16)}, {"position": 16, "tokens": b"xy"}],
    ids=str,
)
async def test_results_that_cannot_be_end_the_session(
    make_swarm: MakeSwarm, changes: dict[str, object]
) -> None:
    swarm = make_swarm()
    chain = await swarm.chain()
    results = swarm.network.dialled[-1]  # block 0's connection for the results
    fields: dict[str, object] = {
        "session": chain._session, "position": 16, "tokens": b"x", "logits": None, "seconds": [0.0] * 3,
    }  # fmt: skip
    writing = chain.write(0, PROMPT, 4000)
    await anext(writing)
    results.inbox.put_nowait(Result(**fields | changes).pack())  # type: ignore[arg-type]
    with pytest.raises(ChainLost) as lost:
        async with asyncio.timeout(DEADLINE):
            async for _ in writing:
                pass
    assert lost.value.code in (ErrorCode.MALFORMED, ErrorCode.LAST_HOP_LOST)
    await chain.close()


async def test_nothing_is_written_without_a_way_for_the_results(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    name = bytes(range(16))
    await swarm.session("hop-2", name, block=2)
    await swarm.session("hop-1", name, block=1, next=HopAddress(peer="hop-2", host="memory", port=1))
    first, _ = await swarm.session("hop-0", name, next=HopAddress(peer="hop-1", host="memory", port=1))
    await first.send(Write(session=name, position=0, tokens=b"abc", count=5))
    message = await first.receive(DEADLINE)
    assert message.code is ErrorCode.UNEXPECTED  # type: ignore[attr-defined]


@pytest.mark.parametrize("blocks", [1, 3])
async def test_a_hop_that_leaves_ends_a_long_text_at_once(make_swarm: MakeSwarm, blocks: int) -> None:
    swarm = make_swarm(small_model(blocks=blocks))
    chain = await swarm.chain()
    writing = chain.write(0, PROMPT, 8000)
    await anext(writing)
    await swarm.node("hop-0").service.stop()
    with pytest.raises(ChainLost) as lost:
        async with asyncio.timeout(DEADLINE):
            async for _ in writing:
                pass
    assert lost.value.code is ErrorCode.LEAVING
    await chain.close()


async def test_the_client_that_vanishes_ends_its_sessions_everywhere(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    chain = await swarm.chain()
    writing = chain.write(0, PROMPT, 8000)
    assert (await anext(writing)).tokens
    for link in chain._links:
        await link.close()
    services = [swarm.node(f"hop-{block}").service for block in range(3)]
    await until(lambda: not any(service.sessions for service in services))
    with pytest.raises(ChainLost):
        async for _ in writing:
            pass
    await chain.close()


async def test_a_client_that_does_not_read_loses_its_session_and_holds_up_nobody(
    make_swarm: MakeSwarm,
) -> None:
    swarm = make_swarm(small_model(blocks=1), limits=Limits(idle_seconds=0.5))
    slow, other = await swarm.chain(), await swarm.chain(1, 0.7)
    results: MemoryLink = slow._links[-1]  # type: ignore[assignment]
    results.reads = False
    writing = asyncio.ensure_future(anext(slow.write(0, PROMPT, 4000)))
    assert await written(other) == await byte_by_byte(LocalChain(swarm.model, 1, 0.7))
    await other.close()
    with capture_logs() as logs:
        await until(lambda: not swarm.node("hop-0").service.sessions)
    assert "timed-out: nothing read for 0.5 s" in [entry.get("reason") for entry in logs]
    await slow.close()
    with pytest.raises(ChainLost):
        await writing


async def test_speculative_decoding_asks_for_nothing_where_nothing_is_wanted(make_swarm: MakeSwarm) -> None:
    chain = await make_swarm().chain()
    assert [part async for part in speculative(chain, PROMPT, 0)] == []
    await chain.close()
