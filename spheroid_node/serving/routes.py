"""Which replicas and versions make a chain: a choice from what the directory says, without I/O."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

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
class Versions:
    """What a chain serves: one version a block, and the interface version that all of them use."""

    interface: int
    blocks: tuple[int, ...]

    def __str__(self) -> str:
        return f"interface {self.interface}, blocks {' '.join(map(str, self.blocks))}"


@dataclass(frozen=True)
class Route:
    """One hop a block, and the interface version that all of them use."""

    interface: int
    hops: tuple[RouteHop, ...]

    @property
    def versions(self) -> Versions:
        return Versions(self.interface, tuple(hop.version for hop in self.hops))


BACK_OFF = 5.0
LONGEST_BACK_OFF = 300.0


@dataclass
class Avoid:
    """What has failed: left out for a while that doubles with every failure, or for good."""

    now: float = 0.0
    """Seconds of any clock that does not jump."""
    peers: dict[str, tuple[float, int]] = field(default_factory=dict)
    """When a peer may be tried again, and how often it has failed."""
    versions: set[tuple[str, int, int]] = field(default_factory=set)
    """(peer, block version, interface version) that the peer says it no longer holds."""

    def blame(self, peer: str) -> None:
        """``peer`` has failed once more."""
        failures = self.peers.get(peer, (0.0, 0))[1] + 1
        self.peers[peer] = self.now + min(BACK_OFF * 2 ** (failures - 1), LONGEST_BACK_OFF), failures

    def leaves_out(self, peer: str) -> bool:
        return peer in self.peers and self.now < self.peers[peer][0]


@dataclass(frozen=True)
class _Offer:
    peer: str
    record: NodeRecord
    version: int


Delay = Callable[[str, str], float]
"""Seconds that a message travels from one peer to another; "" is the client."""


def choose_route(
    run: RunSpec,
    records: Sequence[Mapping[str, NodeRecord]],
    avoid: Avoid | None = None,
    rng: random.Random | None = None,
    *,
    pinned: Versions | None = None,
    delay: Delay = lambda sender, receiver: 0.0,
) -> Route:
    """The quickest chain at the newest interface version that can be used throughout, or at ``pinned``
    versions.

    ``records`` holds the node records of every block in order. A replica costs its compute time times one
    more than its open sessions, and ``delay`` from the hop before; the sum over the chain is least. Between
    equals the choice is random, so that clients spread. Pinned versions that no chain holds any more give way
    to the newest. Raises :class:`BlockWithoutReplica`, or :class:`ChainFailed` when no interface version is
    held for every block, as may be for a moment while replicas take a new one.
    """
    rng, avoid = rng or random.Random(), avoid or Avoid()
    online = [
        {
            peer: record
            for peer, record in nodes.items()
            if record.state == "online" and not avoid.leaves_out(peer)
        }
        for nodes in records
    ]
    empty = [block for block, nodes in enumerate(online) if not nodes]
    if empty:
        raise BlockWithoutReplica(empty)
    if pinned is not None:
        offers = [_holders(run, block, nodes, pinned, avoid) for block, nodes in enumerate(online)]
        if all(offers):
            return Route(pinned.interface, _quickest(offers, delay, rng))
    for interface in _interfaces(run, online):
        offers = [_offers(block, nodes, interface, avoid) for block, nodes in enumerate(online)]
        if all(offers):
            return Route(interface[0], _quickest(offers, delay, rng))
    raise ChainFailed("the replicas hold no version of the interface in common")


def _quickest(offers: Sequence[Sequence[_Offer]], delay: Delay, rng: random.Random) -> tuple[RouteHop, ...]:
    """One offer a block: the shortest way round from the client through all blocks and back.

    The results go to the client and to block 0, and it is the slower of the two that is waited for.
    """
    ways = [_shortest(first, offers[1:], delay, rng) for first in rng.sample(offers[0], len(offers[0]))]
    _, chosen = min(ways, key=lambda way: way[0])
    return tuple(_hop(offer) for offer in chosen)


Way = tuple[float, tuple[_Offer, ...]]


def _shortest(first: _Offer, others: Sequence[Sequence[_Offer]], delay: Delay, rng: random.Random) -> Way:
    """The shortest way that begins with ``first``. Block by block, only the best to each offer matters."""
    ways: list[Way] = [(delay("", first.peer) + _cost(first), (first,))]
    for of_block in others:
        ways = [
            min(
                (
                    (cost + delay(way[-1].peer, offer.peer) + _cost(offer), (*way, offer))
                    for cost, way in ways
                ),
                key=lambda way: way[0],
            )
            for offer in rng.sample(of_block, len(of_block))
        ]
    back = [(cost + max(delay(way[-1].peer, ""), delay(way[-1].peer, first.peer)), way) for cost, way in ways]
    return min(back, key=lambda way: way[0])


def _holders(
    run: RunSpec, block: int, nodes: Mapping[str, NodeRecord], pinned: Versions, avoid: Avoid
) -> list[_Offer]:
    """Replicas that may still hold the pinned versions: none is older, and not too much is newer."""
    wanted = pinned.blocks[block]
    return [
        _Offer(peer, record, wanted)
        for peer, record in nodes.items()
        if (peer, wanted, pinned.interface) not in avoid.versions
        if _may_hold(run, record, block_group(block), wanted)
        and (run.interface == "frozen" or _may_hold(run, record, INTERFACE_GROUP, pinned.interface))
    ]


def _may_hold(run: RunSpec, record: NodeRecord, group: str, version: int) -> bool:
    newest = max((held.version for held in record.held if held.group == group), default=-1)
    return version <= newest < version + run.kept_versions


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


def _cost(offer: _Offer) -> float:
    record = offer.record
    # A session costs a little even where nothing was measured yet, so that clients spread.
    return (record.hop_seconds + 1e-6) * (1 + record.sessions)


def _hop(offer: _Offer) -> RouteHop:
    address = HopAddress(peer=offer.peer, host=offer.record.host, port=offer.record.port)
    return RouteHop(address, offer.version)


def delays_between(records: Sequence[Mapping[str, NodeRecord]], own: Mapping[str, float]) -> Delay:
    """What the nodes have measured, and the client itself (``own``: seconds one way by peer).

    A way that nobody has measured counts as the mean of those that are known, so that it is neither sought
    nor shunned. From a node to the client it is as far as from the client to the node.
    """
    known = {
        (sender, neighbour.peer): neighbour.seconds
        for nodes in records
        for sender, record in nodes.items()
        for neighbour in record.neighbours
    }
    known |= {("", peer): seconds for peer, seconds in own.items()}
    known |= {(peer, ""): seconds for peer, seconds in own.items()}
    usual = fmean(known.values()) if known else 0.0
    return lambda sender, receiver: 0.0 if sender == receiver else known.get((sender, receiver), usual)
