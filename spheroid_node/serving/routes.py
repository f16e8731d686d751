"""Which replicas and versions make a chain: a choice from what the directory says, without I/O."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spheroid_node.errors import BlockWithoutReplica, ChainFailed
from spheroid_node.run import INTERFACE_GROUP, RunSpec, block_group
from spheroid_node.wire.messages import HopAddress
from spheroid_node.wire.records import NodeRecord


@dataclass(frozen=True)
class RouteHop:
    """The replica that serves one block of a chain, and the version it is to serve."""

    address: HopAddress
    version: int


@dataclass(frozen=True)
class Route:
    """One hop a block, and the interface version that all of them use."""

    interface: int
    hops: tuple[RouteHop, ...]


@dataclass
class Avoid:
    """What has failed while this chain was being opened."""

    peers: set[str] = field(default_factory=set)
    versions: set[tuple[str, int, int]] = field(default_factory=set)
    """(peer, block version, interface version) that the peer says it no longer holds."""


@dataclass(frozen=True)
class _Offer:
    peer: str
    record: NodeRecord
    version: int


def choose_route(
    run: RunSpec,
    records: Sequence[Mapping[str, NodeRecord]],
    avoid: Avoid | None = None,
    rng: random.Random | None = None,
) -> Route:
    """The newest interface version that a chain can use throughout, with the quickest replica of each block.

    ``records`` holds the node records of every block in order. A replica's cost is its compute time times one
    more than its open sessions; between equals the choice is random, so that clients spread.
    Raises :class:`BlockWithoutReplica`, or :class:`ChainFailed` when no interface version is held for every
    block, as may be for a moment while replicas take a new one.
    """
    rng, avoid = rng or random.Random(), avoid or Avoid()
    online = [
        {
            peer: record
            for peer, record in nodes.items()
            if record.state == "online" and peer not in avoid.peers
        }
        for nodes in records
    ]
    empty = [block for block, nodes in enumerate(online) if not nodes]
    if empty:
        raise BlockWithoutReplica(empty)
    for interface in _interfaces(run, online):
        offers = [_offers(block, nodes, interface, avoid) for block, nodes in enumerate(online)]
        if all(offers):
            chosen = (min(of_block, key=lambda offer: _cost(offer, rng)) for of_block in offers)
            return Route(interface[0], tuple(_hop(offer) for offer in chosen))
    raise ChainFailed("the replicas hold no version of the interface in common")


def _interfaces(run: RunSpec, online: Sequence[Mapping[str, NodeRecord]]) -> list[tuple[int, bytes]]:
    """Interface versions that a replica of block 0 holds, newest first; a fork's branches apart."""
    if run.interface == "frozen":
        return [(0, b"")]
    held = {
        (version.version, version.digest)
        for record in online[0].values()
        for version in record.held
        if version.group == INTERFACE_GROUP
    }
    return sorted(held, key=lambda version: (-version[0], version[1]))


def _offers(
    block: int, nodes: Mapping[str, NodeRecord], interface: tuple[int, bytes], avoid: Avoid
) -> list[_Offer]:
    """Replicas of ``block`` at the newest version that any of them serves beside ``interface``."""
    offers = [
        _Offer(peer, record, record.serves)
        for peer, record in nodes.items()
        if not interface[1] or _holds(record, interface)
        if any(held.group == block_group(block) for held in record.held)
        if (peer, record.serves, interface[0]) not in avoid.versions
    ]
    newest = max((offer.version for offer in offers), default=0)
    return [offer for offer in offers if offer.version == newest]


def _holds(record: NodeRecord, interface: tuple[int, bytes]) -> bool:
    return any(
        held.group == INTERFACE_GROUP and (held.version, held.digest) == interface for held in record.held
    )


def _cost(offer: _Offer, rng: random.Random) -> tuple[float, int, float]:
    record = offer.record
    return record.hop_seconds * (1 + record.sessions), record.sessions, rng.random()


def _hop(offer: _Offer) -> RouteHop:
    address = HopAddress(peer=offer.peer, host=offer.record.host, port=offer.record.port)
    return RouteHop(address, offer.version)
