"""One hop of a chain in a process of its own: the hop service of a node, without the node.

    python -m benchmarks.hop --model DIR --block N

prints a line of JSON with its peer id and port once it listens, and serves until it is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvloop

from spheroid_node.net.identity import ephemeral_identity
from spheroid_node.net.links import Link, LinkServer, Traffic, dial
from spheroid_node.wire.messages import HopAddress

LOOPBACK = "127.0.0.1"


async def serve(directory: Path, block: int) -> None:
    import torch

    from spheroid_node.model import load
    from spheroid_node.serving.engine import for_serving
    from spheroid_node.serving.hop import HopService
    from spheroid_node.serving.loopback import Always

    torch.set_num_threads(1)
    model = load(directory)
    identity, traffic = ephemeral_identity(), Traffic()

    async def dial_hop(address: HopAddress) -> Link:
        return await dial(address, identity, model.run.run_id, "hop", traffic)

    service = HopService(
        model.run, block, Always(for_serving(model.hop(block))), dial_hop, ThreadPoolExecutor(1)
    )
    server = LinkServer(
        identity,
        model.run,
        LOOPBACK,
        0,
        {"hop": service.handle},
        traffic,
        max_connections=1024,
        max_per_peer=1024,
    )
    await server.start()
    print(json.dumps({"peer": identity.peer, "port": server.port}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--block", type=int, required=True)
    asked = parser.parse_args()
    uvloop.run(serve(Path(asked.model), asked.block))
