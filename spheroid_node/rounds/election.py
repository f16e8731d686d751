"""Who aggregates a group in a round, computed alike by all from the same records (design.md, section 6)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from spheroid_node.run import RunSpec, whole_of


def candidates(run: RunSpec, group: str, round: int, replicas: Collection[str]) -> list[str]:
    """All ``replicas`` of ``group``, the aggregator first; each of the others steps in for those before it.

    Up to ``shard_above`` replicas one peer leads all shards of a block, as if it were not cut; above, each
    shard has a ranking of its own. Two peers that see different numbers of replicas may so see different
    aggregators, which is no worse than where one of them misses a replica: see rounds/forks.py.
    """
    elected = group if len(set(replicas)) > run.round.shard_above else whole_of(group)
    return ranking(run.run_id, elected, round, replicas)


def ranking(run_id: str, group: str, round: int, peers: Iterable[str]) -> list[str]:
    """Peers by rendezvous hash, the aggregator first; each of the others steps in for those before it.

    The hash is BLAKE2b of run, group, round and peer, so a peer that comes or goes moves no other peer
    relative to the rest, and over many rounds each leads equally often. Duplicates are removed.
    """
    prefix = f"{run_id}\n{group}\n{round}\n".encode()
    return sorted(
        set(peers), key=lambda peer: (hashlib.blake2b(prefix + peer.encode()).digest(), peer), reverse=True
    )
