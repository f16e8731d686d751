"""Which versions of the shards of a block belong together (design.md, section 10).

Each shard gains versions by itself, and one whose aggregator was lost has one less than the others. So a
block that is cut into shards is named by a round: at N it is made of the newest version of each shard from
before round N. Whoever holds a version of round N − 1 or later of every shard knows for sure which those are,
and so all who serve N serve the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spheroid_node.run import SHARD_PATIENCE


@dataclass(frozen=True)
class Dated:
    """A version of a shard, and the round that made it; −1 for version 0."""

    version: int
    round: int


def settled(newest: Iterable[int]) -> int:
    """The newest N that shards can be put together at, from the rounds of their newest versions.

    A shard that has stood still for SHARD_PATIENCE rounds is waited for no longer.
    """
    rounds = list(newest)
    return max(min(rounds), max(rounds) - SHARD_PATIENCE) + 1


def at(histories: Sequence[Sequence[Dated]], number: int) -> list[int] | None:
    """The version of each shard at N = ``number``, from the versions that are held, ascending.

    None if that cannot be known, or is not held: a shard has not got so far, or what it had then is gone.
    """
    if not 0 <= number <= settled(history[-1].round for history in histories):
        return None
    found = [_before(history, number) for history in histories]
    return None if None in found else [version for version in found if version is not None]


def _before(history: Sequence[Dated], number: int) -> int | None:
    older = [dated.version for dated in history if dated.round < number]
    if not older:
        return None
    # Where the next version is not held, it may have come before that round too.
    is_newest, followed = len(older) == len(history), older[-1] + 1 in {dated.version for dated in history}
    return older[-1] if is_newest or followed else None


def numbers(histories: Sequence[Sequence[Dated]]) -> list[int]:
    """Each N that is held and brings something new, newest first."""
    rounds = {dated.round for history in histories for dated in history}
    return [round + 1 for round in sorted(rounds, reverse=True) if at(histories, round + 1) is not None]
