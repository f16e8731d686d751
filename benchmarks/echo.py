"""An asyncio server that sends back what it gets: what a link costs at least.

    python -m benchmarks.echo tcp|tls SIZE [SECONDS]

prints its port. With SECONDS it computes for so long before it answers, as a hop does. What comes after a
computation is slower: whoever waits for the answer has fallen asleep, and the caches hold other things.
"""

from __future__ import annotations

import asyncio
import sys
import time

import numpy as np
import uvloop

from benchmarks.hop import LOOPBACK
from spheroid_node.net.identity import ephemeral_identity
from spheroid_node.net.tls import server_context


async def serve(kind: str, size: int, busy: float) -> None:
    weights = np.ones(1 << 16)  # 512 KiB a turn

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                data = await reader.readexactly(size)
                began = time.perf_counter()
                while time.perf_counter() - began < busy:
                    weights.sum()
                # What it really took, for the client to take off.
                writer.write(data + np.float64(time.perf_counter() - began).tobytes())
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    context = server_context(ephemeral_identity()) if kind == "tls" else None
    server = await asyncio.start_server(echo, LOOPBACK, 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0))
