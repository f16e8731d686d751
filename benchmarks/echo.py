"""An asyncio server that sends back what it gets: what a link costs at least.

python -m benchmarks.echo tcp|tls SIZE
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from benchmarks.hop import LOOPBACK
from spheroid_node.net.identity import ephemeral_identity
from spheroid_node.net.tls import server_context


async def serve(kind: str, size: int) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    context = server_context(ephemeral_identity()) if kind == "tls" else None
    server = await asyncio.start_server(echo, LOOPBACK, 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
