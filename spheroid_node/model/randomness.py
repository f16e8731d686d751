"""Randomness as a function of its arguments: counter-based, the same on every machine and in every order.

The noise at a position and the sampling noise at a position depend on (seed, position) alone, so the text
does not depend on the route, the decoder or how many positions are computed at once (design.md, section 7).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spheroid_node.run import VOCABULARY

_LATENT, _GUMBEL, _STREAM = 1, 2, 3
_WORD = 2**64


def _philox(domain: int, seed: int, *counter: int) -> np.random.Generator:
    words = [0, *counter][:4]
    words += [0] * (4 - len(words))
    return np.random.Generator(
        np.random.Philox(
            key=np.array([seed % _WORD, domain], dtype=np.uint64),
            counter=np.array([word % _WORD for word in words], dtype=np.uint64),
        )
    )


def stream(seed: int, *words: int) -> np.random.Generator:
    """A generator of its own for each (seed, words); up to three words, e.g. (round, step)."""
    if len(words) > 3:
        raise ValueError("a stream is named by a seed and at most three words")
    return _philox(_STREAM, seed, *words)


def position_noise(seed: int, start: int, count: int, width: int) -> Tensor:
    """Standard normal ε of positions start … start + count − 1: shape [count, width], float32."""
    noise = np.empty((count, width), dtype=np.float32)
    for row in range(count):
        noise[row] = _philox(_LATENT, seed, start + row).standard_normal(width, dtype=np.float32)
    return torch.from_numpy(noise)


def gumbel_noise(seed: int, position: int) -> Tensor:
    """Standard Gumbel noise of the byte at ``position``: shape [256], float64."""
    uniform = _philox(_GUMBEL, seed, position).random(VOCABULARY)
    return torch.from_numpy(-np.log(-np.log(np.clip(uniform, 1e-300, 1 - 1e-16))))


def decide(logits_V: Tensor, seed: int, position: int, temperature: float) -> int:
    """The byte at ``position``: the most likely at temperature 0, else a sample by the Gumbel-max rule."""
    return int(scores(logits_V, seed, position, temperature).argmax())


def scores(logits_V: Tensor, seed: int, position: int, temperature: float) -> Tensor:
    """What decides the byte at ``position``, [256]: the logits, and at a temperature their Gumbel noise."""
    logits_V = logits_V.detach().double().cpu()
    if temperature > 0:
        logits_V = logits_V / temperature + gumbel_noise(seed, position)
    return logits_V
