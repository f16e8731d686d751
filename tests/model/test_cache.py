"""What a layer keeps of a text: everything a later position may read, and not more for a longer text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spheroid_node.model.cache import SLACK, BlockCache, PositionCache, segments

WINDOW = 16


def numbers(start: int, end: int) -> Tensor:
    return torch.arange(float(start), float(end)).view(1, -1, 1)


def test_a_cache_holds_what_came_in() -> None:
    keys, values = torch.randn(2, 1, 2, 260, 3, generator=torch.Generator().manual_seed(3))
    cache, start = PositionCache(WINDOW), 0
    for count in (1, 62, 1, 1, 160, 35):
        end = start + count
        found = cache.append(keys[:, :, start:end], values[:, :, start:end])
        assert torch.equal(found[0], keys[:, :, :end])
        assert torch.equal(found[1], values[:, :, :end])
        start = end
    assert cache.length == 260


def test_a_cut_cache_holds_only_what_comes_after() -> None:
    cache = PositionCache(WINDOW)
    cache.append(numbers(0, 10))
    cache.truncate(20)
    assert cache.length == 10
    cache.truncate(4)
    assert cache.length == 4
    (found,) = cache.append(torch.tensor([70.0, 80.0]).view(1, 2, 1))
    assert found.flatten().tolist() == [0, 1, 2, 3, 70, 80]
    cache.truncate(0)
    (found,) = cache.append(numbers(9, 10))
    assert found.flatten().tolist() == [9]


@pytest.mark.parametrize("piece", [1, 7, 128])
def test_a_long_text_takes_no_more_room_and_loses_nothing_that_is_read(piece: int) -> None:
    cache, most = PositionCache(WINDOW), 0
    for start in range(0, 6000, piece):
        (found,) = cache.append(numbers(start, start + piece))
        needed = min(start, WINDOW - 1) + piece
        assert found.flatten()[-needed:].tolist() == list(range(start + piece - needed, start + piece))
        assert cache.first + found.shape[1] == cache.length == start + piece
        most = max(most, cache.bytes)
    assert most <= 4 * 2 * (WINDOW + SLACK + SLACK // 2 + 2 * piece)


def test_a_long_text_can_be_taken_back_by_the_slack() -> None:
    cache = PositionCache(WINDOW)
    for start in range(0, 3000, 10):
        cache.append(numbers(start, start + 10))
        back = max(0, cache.length - SLACK)
        assert cache.oldest <= back
    cache.truncate(back)
    (found,) = cache.append(torch.full((1, 1, 1), -1.0))
    assert found.flatten()[-WINDOW:].tolist() == [*range(back - WINDOW + 1, back), -1]
    with pytest.raises(ValueError, match="cannot be taken back"):
        cache.truncate(cache.oldest - 1)


def test_segments_lie_one_after_the_other() -> None:
    caches = [BlockCache(2, WINDOW) for _ in range(3)]
    assert [(part.start, part.end) for part in segments(caches, [2, 1, 5])] == [(0, 2), (2, 3), (3, 8)]
