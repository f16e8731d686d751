"""What a node says in its record about the versions that it holds."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from spheroid_node.run import INTERFACE_GROUP, RunSpec, block_group, whole_of
from spheroid_node.wire.messages import PREFIX_BYTES, HopAddress, Manifest
from spheroid_node.wire.records import HeldVersion, NodeRecord

if TYPE_CHECKING:
    from spheroid_node.node.versions import Held, VersionStore

ENTRY = struct.Struct(f">I{PREFIX_BYTES}s")
"""Of ``shards`` in a record, one for each shard of what the node trains, in their order."""
LARGEST = 2**32 - 1
"""Version that an entry has room for."""

T = TypeVar("T")


@dataclass(frozen=True)
class Holding:
    """A version that a node holds; ``digest`` may be the beginning of it alone."""

    version: int
    digest: bytes

    def is_of(self, manifest: Manifest) -> bool:
        return manifest.version == self.version and manifest.digest.startswith(self.digest)


def holding(run: RunSpec, record: NodeRecord, group: str) -> Holding | None:
    """The newest version of ``group`` that ``record`` tells of."""
    if run.round.shards == 1:
        found = (Holding(item.version, item.digest) for item in record.held if item.group == group)
        return next(found, None)
    groups = run.worker_groups(record.block)
    if group not in groups or len(record.shards) != ENTRY.size * len(groups):
        return None
    return Holding(*ENTRY.unpack_from(record.shards, ENTRY.size * groups.index(group)))


def owns(record: NodeRecord, group: str) -> bool:
    """Whether a node takes part in the rounds of ``group``; all blocks do in those of the interface."""
    return record.state == "online" and whole_of(group) in (block_group(record.block), INTERFACE_GROUP)


def address_of(peer: str, record: NodeRecord) -> HopAddress:
    """Where a node listens."""
    return HopAddress(peer=peer, host=record.host, port=record.port)


def shuffled(items: Iterable[T]) -> list[T]:
    """In an order of chance."""
    return random.sample(listed := list(items), len(listed))


def held_fields(run: RunSpec, block: int, store: VersionStore) -> dict[str, Any]:
    """The fields ``held``, ``shards`` and ``serves`` of the record of a node that owns ``block``."""
    wholes = [store.whole_behind(name, 0) for name in run.worker_wholes(block)]
    served = store.whole_behind(block_group(block), run.lag(block))
    groups = run.worker_groups(block) if run.round.shards > 1 else ()
    return {
        "held": [
            HeldVersion(group=whole.name, version=whole.number, digest=whole.digest)
            for whole in wholes
            if whole is not None
        ],
        "shards": _packed(map(store.newest, groups)),
        "serves": served.number if served is not None else 0,
    }


def _packed(newest: Iterable[Held]) -> bytes:
    return b"".join(ENTRY.pack(min(held.version, LARGEST), held.digest[:PREFIX_BYTES]) for held in newest)
