"""Which of several manifests everyone follows (design.md, section 6, point 8)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from spheroid_node.rounds.slots import Slots
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.messages import MAX_UPDATES, MAX_UPDATES_NAMED, PREFIX_BYTES, Manifest

Signed = tuple[str, Manifest]
"""Signer and manifest."""


def choose(manifests: Iterable[Signed]) -> Signed | None:
    """The manifest to follow, the same for every order in which they came; None if there is none.

    The most updates behind it: of two made from one version that is the one with more accepted updates, and
    a node that made versions alone while it was cut off gives way to the swarm. Then the higher version, the
    better rank, the lower digest. What is equal in all of these describes the same parameters; signer and
    content only make the choice unique.
    """
    return min(manifests, key=precedence, default=None)


def precedence(signed: Signed) -> tuple[int, int, int, bytes, str, bytes]:
    """Sorts manifests, the one to follow first."""
    peer, manifest = signed
    return (
        -manifest.total,
        -manifest.version,
        manifest.rank,
        manifest.digest,
        peer,
        manifest.pack(),
    )


def is_plausible(manifest: Manifest, run: RunSpec, elements: int, now: float) -> bool:
    """Whether a manifest of ``run`` can be true at ``now``, before anything is fetched because of it.

    A round makes one version at most, from one to MAX_UPDATES accepted updates, each by another worker: so
    a version number, or the updates behind it, cannot run ahead of time. The next round is allowed for clocks
    that differ.
    """
    accepted = [update for update in manifest.updates if update.verdict is Verdict.ACCEPTED]
    return (
        manifest.run == run.run_id
        and manifest.group in run.groups
        and manifest.elements == elements
        and manifest.version <= manifest.round + 1
        and manifest.round <= Slots.of(run.round).round_at(now) + 1
        and len(accepted) > 0
        and max(update.norm for update in accepted) <= run.round.max_update_norm
        and manifest.version - 1 <= manifest.total - manifest.accepted <= MAX_UPDATES * (manifest.version - 1)
        and len({update.peer for update in accepted}) == len(accepted)
        and (not manifest.also or _is_sound(manifest.beside, [update.digest for update in accepted]))
    )


def _is_sound(beside: list[bytes], named: list[bytes]) -> bool:
    """Whether so many updates had to be left unnamed, and none of them counts twice."""
    return (
        len(named) == MAX_UPDATES_NAMED
        and len(beside[-1]) == PREFIX_BYTES
        and all(before < after for before, after in pairwise(beside))
        and not {digest[:PREFIX_BYTES] for digest in named} & set(beside)
    )
