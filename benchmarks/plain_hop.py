"""A hop of a plain pipeline: what an ordinary chain of machines does, as plainly as it can be written.

    python -m benchmarks.plain_hop --model DIR --block N --next PORT

One text, one byte a traversal, raw TCP without encryption, float32 states, no sessions: receive a state,
compute, send it on. It prints its port. The last hop sends each byte to whoever connects to it first.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
from pathlib import Path

import numpy as np
import uvloop

HEADER = struct.Struct("<IH")
"""Position and byte, then the state: hidden and z, float32, one after the other."""
LOOPBACK = "127.0.0.1"


async def serve(directory: Path, block: int, after: int | None, seed: int, temperature: float) -> None:
    import torch

    from spheroid_node.model import load
    from spheroid_node.model.cache import segments
    from spheroid_node.model.composed import ChainState
    from spheroid_node.model.randomness import decide, position_noise

    torch.set_num_threads(1)
    hop = load(directory).hop(block).requires_grad_(False)
    width = hop.run.model.width
    done = asyncio.Event()

    def compute(position: int, token: int, state: ChainState, cache: object) -> tuple[ChainState, int]:
        with torch.inference_mode():
            onward, logits_BTV = hop.step(torch.tensor([[token]]), state, segments([cache], [1]))  # type: ignore[list-item]
            logits_V = hop.readout(onward, logits_BTV)[0, -1]
        return onward, decide(logits_V, seed, position + 1, temperature)

    def state_of(position: int, body: bytes) -> ChainState:
        if not body:
            return hop.start(position_noise(seed, position, 1, width)[None])
        rows = torch.from_numpy(np.frombuffer(body, np.float32).reshape(2, 1, 1, width).copy())
        return ChainState(rows[0], rows[1], None)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Positions come from the client at block 0, from the hop before elsewhere."""
        cache, size = hop.block.new_cache(), 2 * 4 * width if block else 0
        onward = None
        if after is not None:
            _, onward = await asyncio.open_connection(LOOPBACK, after)
        try:
            while True:
                head = await reader.readexactly(HEADER.size)
                position, token = HEADER.unpack(head)
                state = state_of(position, await reader.readexactly(size) if size else b"")
                state, decided = compute(position, token, state, cache)
                if onward is None:
                    client.write(bytes([decided]))
                    continue
                hidden, noisy = state.hidden_BTD.numpy().tobytes(), state.noisy_BTD.numpy().tobytes()
                onward.write(head + hidden + noisy)
        except (asyncio.IncompleteReadError, OSError):
            done.set()

    async def first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal client
        if after is None and client is None:
            client = writer
        else:
            await handle(reader, writer)

    client: asyncio.StreamWriter = None  # type: ignore[assignment]
    server = await asyncio.start_server(first, LOOPBACK, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await done.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--block", type=int, required=True)
    parser.add_argument("--next", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    asked = parser.parse_args()
    uvloop.run(serve(Path(asked.model), asked.block, asked.next, asked.seed, asked.temperature))
