"""A chain of hops over connections equals the same model in one process."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from spheroid_node.model.interface import MASK
from spheroid_node.model.randomness import decide, position_noise
from spheroid_node.serving.chain import Chain, ChainLost
from spheroid_node.serving.decoders import DECODERS, DecoderName, decode
from spheroid_node.serving.local import LocalChain
from spheroid_node.wire.codes import ErrorCode
from tests.serving.memory import DEADLINE, MakeSwarm, small_model, until

WINDOW = 24
ROUNDING = 5e-3
"""What states rounded to 16 bits make of log-probabilities."""
PROMPTS = [b"T", "The castle – at dusk".encode(), bytes(range(100, 100 + WINDOW))]


async def text(swarm_run: Any, chain: Chain, decoder: DecoderName, prompt: bytes, count: int) -> bytes:
    async with asyncio.timeout(DEADLINE):
        parts = [part async for part in decode(decoder, swarm_run, chain, prompt, count)]
    await chain.close()
    return b"".join(parts)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize(("seed", "temperature"), [(0, 0.0), (7, 1.0), (2**63 - 1, 0.4)])
async def test_text_equals_local(
    make_swarm: MakeSwarm, decoder: DecoderName, prompt: bytes, seed: int, temperature: float
) -> None:
    swarm = make_swarm()
    count = 2 * WINDOW + 5  # past the window
    local = LocalChain(swarm.model, seed, temperature)
    remote = await swarm.chain(seed, temperature)
    expected = await text(swarm.run, local, decoder, prompt, count)
    assert len(expected) == count
    assert len(set(expected)) > 3
    assert await text(swarm.run, remote, decoder, prompt, count) == expected


@pytest.mark.parametrize(
    "learning",
    [
        {},
        {"denoiser": "edm", "conditioning": "context"},
        {"readout": "mean"},
        {"denoiser": "edm", "readout": "mean"},
    ],
    ids=str,
)
async def test_logits_equal_an_uncached_forward(make_swarm: MakeSwarm, learning: dict[str, str]) -> None:
    """Whatever way the positions come in, and past the window; but for the rounding of states to 16 bits."""
    swarm = make_swarm(small_model(**learning))
    tokens = bytes(range(40, 40 + 2 * WINDOW))
    noise_BTD = position_noise(9, 0, len(tokens), swarm.run.model.width)[None]
    with torch.inference_mode():
        _, log_probs_BTV = swarm.model(torch.tensor([[*tokens]]), noise_BTD)
    found = []
    for chain in (LocalChain(swarm.model, 9, logits=True), await swarm.chain(9, logits=True)):
        whole = await chain.sweep(0, tokens[:20], decide=20)
        single = [await chain.sweep(position, tokens[position : position + 1]) for position in range(20, 30)]
        rest = await chain.sweep(30, tokens[30:], decide=len(tokens) - 30)
        logits = np.concatenate([sweep.logits for sweep in (whole, *single, rest)])  # type: ignore[misc]
        found.append(logits)
        np.testing.assert_allclose(logits, log_probs_BTV[0].numpy(), atol=ROUNDING)
        tokens_found = b"".join(sweep.tokens for sweep in (whole, *single, rest))
        assert tokens_found == bytes(logits.argmax(-1).tolist())
        assert (whole.position, single[0].position, rest.position) == (1, 21, 31)
        await chain.close()
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-6)  # which come as float32


async def test_bytes_are_decided_with_the_noise_of_their_place_in_the_text(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    chain = await swarm.chain(seed=8, temperature=1.5, logits=True)
    sweep = await chain.sweep(0, b"The castle", decide=10)
    assert sweep.logits is not None
    rows = torch.from_numpy(sweep.logits.copy())
    assert [*sweep.tokens] == [decide(row, 8, place, 1.5) for place, row in enumerate(rows, start=1)]
    await chain.close()


async def test_masked_positions_equal_an_uncached_forward_with_mask_tokens(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    tokens = torch.tensor([[*b"abc", MASK, MASK, MASK]])
    with torch.inference_mode():
        _, log_probs_BTV = swarm.model(tokens, position_noise(1, 0, 6, swarm.run.model.width)[None])
    chain = await swarm.chain(1, logits=True)
    sweep = await chain.sweep(0, b"abc", masked=3, decide=4)
    assert sweep.logits is not None
    np.testing.assert_allclose(sweep.logits, log_probs_BTV[0, 2:].numpy(), atol=ROUNDING)
    assert sweep.position == 3
    await chain.close()


async def test_rolled_back_positions_leave_no_trace(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    chain, straight = await swarm.chain(logits=True), await swarm.chain(logits=True)
    await chain.sweep(0, b"The castle was old")
    await chain.sweep(18, b"x")
    back = await chain.sweep(4, b"tower", decide=5)
    await straight.sweep(0, b"The ")
    expected = await straight.sweep(4, b"tower", decide=5)
    assert back.logits is not None and expected.logits is not None
    np.testing.assert_allclose(back.logits, expected.logits, atol=1e-4)
    assert back.tokens == expected.tokens
    await chain.close()
    await straight.close()


async def test_sweeps_in_flight_at_once_come_back_in_order(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    prompt = b"The castle was o"
    chain, local = await swarm.chain(), LocalChain(swarm.model)
    tasks = [
        asyncio.create_task(chain.sweep(position, prompt[position : position + 2], decide=2))
        for position in range(0, len(prompt), 2)
    ]
    sweeps = await asyncio.gather(*tasks)
    assert [sweep.position for sweep in sweeps] == [*range(1, len(prompt), 2)]
    expected = await local.sweep(0, prompt, decide=len(prompt))
    assert b"".join(sweep.tokens for sweep in sweeps) == expected.tokens
    await chain.close()


async def test_sessions_do_not_see_each_other(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    prompts = [b"The castle", b"A river", b"In 1905, the"]
    expected = [await text(swarm.run, LocalChain(swarm.model), "autoregressive", p, 20) for p in prompts]
    chains = [await swarm.chain() for _ in prompts]
    texts = [text(swarm.run, c, "autoregressive", p, 20) for c, p in zip(chains, prompts, strict=True)]
    assert await asyncio.gather(*texts) == expected


@pytest.mark.parametrize("decoder", DECODERS)
async def test_no_bytes_asked_for(make_swarm: MakeSwarm, decoder: DecoderName) -> None:
    swarm = make_swarm()
    assert await text(swarm.run, await swarm.chain(), decoder, b"The", 0) == b""


@pytest.mark.parametrize("remote", [False, True])
async def test_a_gap_loses_the_chain_with_a_reason(make_swarm: MakeSwarm, remote: bool) -> None:
    swarm = make_swarm()
    chain = await swarm.chain() if remote else LocalChain(swarm.model)
    await chain.sweep(0, b"abc")
    with pytest.raises(ChainLost) as lost:
        await chain.sweep(4, b"x")
    assert lost.value.code is ErrorCode.UNEXPECTED
    await chain.close()


async def test_close_frees_the_session_at_every_hop(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    chain = await swarm.chain()
    services = [swarm.node(f"hop-{block}").service for block in range(3)]
    assert [service.sessions for service in services] == [1, 1, 1]
    await chain.close()
    await until(lambda: not any(service.sessions for service in services))
    with pytest.raises(ChainLost):
        await chain.sweep(0, b"abc")
