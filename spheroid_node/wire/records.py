"""Values of DHT records (protocols/dht.md). The DHT's validator signs them; these are their bodies."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from spheroid_node.wire.messages import (
    Count,
    Digest,
    Finite,
    Group,
    Host,
    Message,
    PeerId,
    Port,
    RunId,
)

PREFIX = "spheroid/1"
NODE_TTL = 45.0
"""Seconds a node record lives; it is renewed three times as often."""
MANIFEST_ROUNDS = 32
SHORTEST_MANIFEST_TTL, LONGEST_MANIFEST_TTL = 300.0, 6 * 3600.0
RUN_TTL = 3600.0
MAX_RECORD_BYTES = 20_480
"""A manifest of MAX_UPDATES updates has about 18,600."""
MAX_NEIGHBOURS = 32
MAX_SHARDS = 2 * 256
"""Of a block and the interface."""
SHARD_BYTES = 12


def runs_key() -> str:
    """Key under which bootstraps list the runs they publish."""
    return f"{PREFIX}/runs"


def run_key(run: str) -> str:
    """Key of a run's packed RunSpec."""
    return f"{PREFIX}/{run}/run"


def nodes_key(run: str, block: int) -> str:
    """Key of the node records of one block: what a node reads grows with a block, not with the swarm."""
    return f"{PREFIX}/{run}/nodes/{block}"


def manifests_key(run: str, group: str) -> str:
    """Key of the newest manifests of a group, one a signer."""
    return f"{PREFIX}/{run}/manifests/{group}"


def manifest_ttl(period: float) -> float:
    """Seconds that a manifest is kept in the DHT, where rounds last ``period`` seconds.

    Each round has another author, and all that have not expired are read as one dictionary, of which 4 MiB
    would be too many. Longer than that, whoever holds a version hands its manifest out.
    """
    return min(max(MANIFEST_ROUNDS * period, SHORTEST_MANIFEST_TTL), LONGEST_MANIFEST_TTL)


class RunAdvert(Message):
    """A bootstrap's line under :func:`runs_key`."""

    run: RunId
    name: Annotated[str, Field(max_length=64)]


class HeldVersion(Message):
    """A version that a node can hand out and serve."""

    group: Group
    version: Count
    digest: Digest


class Neighbour(Message):
    """How long a message takes to another node, as far as the node itself has measured."""

    peer: PeerId
    seconds: Annotated[Finite, Field(ge=0, le=60)]
    """One way: half a round trip."""


class NodeRecord(Message):
    """What a node says about itself, renewed every few seconds."""

    run: RunId
    block: Count
    state: Literal["joining", "online", "leaving"]
    host: Host
    port: Port
    device: Annotated[str, Field(max_length=64)]
    started: Finite
    round: Annotated[int, Field(ge=-1, lt=2**63)]
    """Newest round it took part in; −1 before the first."""
    held: Annotated[list[HeldVersion], Field(max_length=16)]
    """Blocks and interface."""
    serves: Count
    """The version of its block that new sessions get: behind the newest where the run staggers its blocks."""
    accepted: Count
    late: Count
    refused: Count
    led: Count
    """Versions it wrote as an aggregator."""
    tokens_per_second: Annotated[Finite, Field(ge=0)]
    train_loss: Finite | None
    from_noise_ce: Finite | None
    """Nats a byte on held-out text after this node's block, at the versions the round began with."""
    bytes_in: Count
    bytes_out: Count
    sessions: Count
    hop_seconds: Annotated[Finite, Field(ge=0)]
    """Median compute time of a single-position step; 0 before the first."""
    neighbours: Annotated[list[Neighbour], Field(default_factory=list, max_length=MAX_NEIGHBOURS)]
    """The nodes that this one may be followed by in a chain."""
    note: Annotated[str, Field(max_length=200)] = ""
    """The newest thing its owner should know, e.g. that it misses deadlines."""
    shards: Annotated[bytes, Field(max_length=MAX_SHARDS * SHARD_BYTES)] = b""
    """Of a run with shards, the newest version of each shard that the node trains, 12 bytes each: the version
    and the first 8 bytes of its digest."""
