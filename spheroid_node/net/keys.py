"""What a node keeps in the DHT: the keys of its run, and what may stand under each (protocols/dht.md).

hivemind hands over the hash of a key, not the key. So a node works out those that it knows, and refuses all
others: under keys that nobody reads, strangers could fill its memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from spheroid_node.net._hivemind import DHTID
from spheroid_node.run import MAX_RUN_BYTES, RunSpec
from spheroid_node.wire.records import (
    MAX_RECORD_BYTES,
    NODE_TTL,
    RUN_TTL,
    SHARD_BYTES,
    manifest_ttl,
    manifests_key,
    nodes_key,
    run_key,
    runs_key,
)
from spheroid_node.wire.signing import SIGNATURE_BYTES

ANSWER_BYTES = 3 * 2**20
"""Most that stands under a key: a node answers with all of it in one message, of 4 MiB at most."""
FRAMING_BYTES = 96
"""Of a record in an answer, beside its value and its signature: author, expiration and their headers."""
ADVERT_BYTES = 512
NODE_BYTES = 4096
"""Of a node record without its shards. The largest that a node writes has about 3,800."""
HEADER_BYTES = 3
CLOCK_SLACK = 60.0
"""Seconds by which an author's clock may be ahead of ours."""


@dataclass(frozen=True)
class Kind:
    """What may stand under a key."""

    record_bytes: int
    """Most of a record, without its signature."""
    ttl: float
    """Seconds that it lives."""
    allows: Callable[[str], bool] = lambda peer: True
    """Whether a peer may be an author."""
    holds: Callable[[bytes], bool] = lambda body: True
    """Whether that is a record's body."""
    pooled: bool = False
    """Whether it shares the room of all such records of a node (store.py)."""

    @property
    def authors(self) -> int:
        """How many there is room for, each with the largest record: so whoever is in stays, and may grow."""
        return ANSWER_BYTES // (self.record_bytes + SIGNATURE_BYTES + FRAMING_BYTES)

    def lives(self, expiration: float, now: float) -> bool:
        """Whether a record is to be kept: it has not expired, and does so in time."""
        return now <= expiration <= now + self.ttl + CLOCK_SLACK


class Keys:
    """The keys that a node knows: at first only the one under which runs are listed."""

    def __init__(self) -> None:
        self._kinds = {_key_id(runs_key()): Kind(ADVERT_BYTES, RUN_TTL)}

    def look_for(self, run_id: str) -> None:
        """Know the key of a run's specification, before anything else of it is known."""
        is_run = partial(_is_run, run_id)
        self._kinds[_key_id(run_key(run_id))] = Kind(MAX_RUN_BYTES + HEADER_BYTES, RUN_TTL, holds=is_run)

    def know(self, run: RunSpec) -> None:
        """Know all keys of ``run``."""
        self.look_for(run.run_id)
        shards = SHARD_BYTES * len(run.worker_groups(0))
        node = Kind(NODE_BYTES + shards, NODE_TTL, run.allows)
        manifest = Kind(MAX_RECORD_BYTES, manifest_ttl(run.round.period), run.allows, pooled=True)
        for block in range(run.model.blocks):
            self._kinds[_key_id(nodes_key(run.run_id, block))] = node
        for group in run.groups:
            self._kinds[_key_id(manifests_key(run.run_id, group))] = manifest

    def kind(self, key_id: bytes) -> Kind | None:
        """What may stand under a key, by its hash; None if the key is not known."""
        return self._kinds.get(key_id)

    def kind_of(self, key: str) -> Kind | None:
        return self.kind(_key_id(key))


def _key_id(key: str) -> bytes:
    return bytes(DHTID.generate(source=key).to_bytes())


def _is_run(run_id: str, body: bytes) -> bool:
    """Anybody may hold a run's specification for others, and nobody can put another in its place."""
    return hashlib.blake2b(body).hexdigest()[:16] == run_id
