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
    """Parameters and version of every group, as they belong together: what a chain of hops serves.

    Raises :class:`ChainFailed` where a version was announced and nobody hands it out.
    """
    groups = client.run.groups
    announced = await asyncio.gather(*map(client.directory.newest_manifest, groups))
    store = VersionStore(client.run)
    sync = Synchroniser(client, store)
    held = await asyncio.gather(*map(sync.sync, groups))
    lost = [
        group
        for group, version, newest in zip(groups, held, announced, strict=True)
        if newest is not None and version.version < newest[1].version
    ]
    if lost:
        raise ChainFailed(f"nobody hands out the newest version of {', '.join(lost)}")
    lags = client.run.lags
    held = await asyncio.gather(*(sync.behind(group, lags[group]) for group in groups))
    return (
        {group: version.vector for group, version in zip(groups, held, strict=True)},
        {group: version.version for group, version in zip(groups, held, strict=True)},
    )
