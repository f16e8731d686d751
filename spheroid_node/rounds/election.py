"""Who aggregates a group in a round, computed alike by all from the same records (design.md, section 6)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def ranking(run_id: str, group: str, round: int, peers: Iterable[str]) -> list[str]:
    """Peers by rendezvous hash, the aggregator first; each of the others steps in for those before it.

    The hash is BLAKE2b of run, group, round and peer, so a peer that comes or goes moves no other peer
    relative to the rest, and over many rounds each leads equally often. Duplicates are removed.
    """
    prefix = f"{run_id}\n{group}\n{round}\n".encode()
    return sorted(
        set(peers), key=lambda peer: (hashlib.blake2b(prefix + peer.encode()).digest(), peer), reverse=True
    )
