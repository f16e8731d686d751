"""What a command that is no node does with a swarm: enter it, and put its model together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from spheroid_node.config import NodeConfig
from spheroid_node.errors import ChainFailed
from spheroid_node.net.distance import measure_distances
from spheroid_node.net.identity import ephemeral_identity
from spheroid_node.node.access import Client, open_client
from spheroid_node.node.sync import Synchroniser
from spheroid_node.node.versions import VersionStore
from spheroid_node.serving.finding import PATIENCE, ChainFinder
from spheroid_node.serving.remote import Generation
from spheroid_node.wire.tensors import Vector

__all__ = ["Client", "chain_finder", "fetch_model", "swarm_client"]


@asynccontextmanager
async def swarm_client(config: NodeConfig) -> AsyncIterator[Client]:
    """A client for one command: a key of its own that nothing keeps, and nobody needs to reach it."""
    async with open_client(config, ephemeral_identity(), client_mode=True) as client:
        yield client


def chain_finder(
    client: Client,
    generation: Generation,
    patience: float = PATIENCE,
    waiting: Callable[[str], None] = lambda reason: None,
) -> ChainFinder:
    """Finds the chains of one text in the swarm of ``client``."""
    return ChainFinder(
        client.directory,
        client.run,
        lambda address: client.dial(address, "hop"),
        generation,
        measure=measure_distances,
        patience=patience,
        waiting=waiting,
    )


async def fetch_model(client: Client) -> tuple[dict[str, Vector], dict[str, int]]:
    """Parameters and version of the blocks and of the interface, as they belong together: what hops serve.

    Raises :class:`ChainFailed` where a version was announced and nobody hands it out.
    """
    groups, lags = client.run.groups, client.run.lags
    sync = Synchroniser(client, VersionStore(client.run))
    held = await asyncio.gather(*map(sync.sync, groups))
    lost = [item.group for item in held if not item.version and item.group in sync.not_handed_out]
    if lost:
        raise ChainFailed(f"nobody hands out the newest version of {', '.join(lost)}")
    wholes = await asyncio.gather(*(sync.whole(name, lag) for name, lag in lags.items()))
    found = {name: whole for name, whole in zip(lags, wholes, strict=True) if whole is not None}
    if apart := lags.keys() - found.keys():
        raise ChainFailed(f"nobody hands out shards that belong together of {', '.join(sorted(apart))}")
    return (
        {name: whole.vector for name, whole in found.items()},
        {name: whole.number for name, whole in found.items()},
    )
