"""`mask_suffix`: training on windows of which only the beginning is known, as `one-sweep` reads them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from spheroid_node.model.composed import Hop
from spheroid_node.model.interface import MASK
from spheroid_node.model.randomness import position_noise, stream
from spheroid_node.run import RunSpec
from spheroid_node.training.local import LocalTrainer
from spheroid_node.training.loss import block_loss, upstream_hidden
from spheroid_node.training.text import Text, held_out_windows, suffix_masks

MakeRun = Callable[..., RunSpec]
WINDOW = 32
RECIPES = [
    {"denoiser": denoiser, "conditioning": conditioning}
    for denoiser in ("evidence", "edm", "plain")
    for conditioning in ("chain", "context")
]


def masking(make_run: MakeRun, share: float, **learning: object) -> RunSpec:
    return make_run(training={"mask_suffix": share}, **learning)


# --- which inputs -----------------------------------------------------------------------------------


def test_a_mask_is_a_suffix_and_leaves_the_first_byte() -> None:
    masked_BT = suffix_masks(1.0, 4000, 8, stream(0))
    assert (masked_BT.dtype, masked_BT.shape) == (torch.bool, (4000, 8))
    assert (masked_BT[:, 1:] >= masked_BT[:, :-1]).all()
    known = (~masked_BT).sum(dim=1)
    counts = np.bincount(known.numpy(), minlength=9)
    assert counts[0] == counts[8] == 0
    # From each of the seven other positions on equally often: 571 expected, with a deviation of 22.
    assert counts[1:8].min() > 571 - 110 and counts[1:8].max() < 571 + 110


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_so_many_windows_are_masked_and_the_others_whole(share: float) -> None:
    masked_BT = suffix_masks(share, 4000, 8, stream(1))
    assert float(masked_BT[:, -1].float().mean()) == pytest.approx(share, abs=0.04)
    assert not masked_BT[~masked_BT[:, -1]].any()


def test_the_shortest_window_has_room_for_one_mask() -> None:
    assert suffix_masks(1.0, 3, 2, stream(0)).tolist() == [[False, True]] * 3


# --- what is drawn ----------------------------------------------------------------------------------


@pytest.mark.parametrize("learning", [{}, {"denoiser": "edm", "lookahead": 0.5}], ids=["plain", "all"])
def test_all_else_is_drawn_as_without_masks(
    make_run: MakeRun, text: Text, learning: dict[str, object]
) -> None:
    clean, masked = (
        LocalTrainer(masking(make_run, share, blocks=3, **learning), 1, text, worker_seed=4)._draw()
        for share in (0.0, 0.75)
    )
    assert clean.masked_BT is None
    assert torch.equal(clean.tokens_BT, clean.windows_BT[:, :-1])
    assert torch.equal(masked.windows_BT, clean.windows_BT)
    assert torch.equal(masked.targets_BT, clean.windows_BT[:, 1:])
    pairs = [(masked.own, clean.own)]
    if masked.ahead is not None and clean.ahead is not None:
        assert learning
        pairs.append((masked.ahead, clean.ahead))
        assert masked.start_noise_BTD is not None and clean.start_noise_BTD is not None
        assert torch.equal(masked.start_noise_BTD, clean.start_noise_BTD)
    for one, other in pairs:
        assert torch.equal(one.sigma_B, other.sigma_B)
        assert torch.equal(one.noise_BTD, other.noise_BTD)
    assert masked.masked_BT is not None
    assert (masked.tokens_BT[masked.masked_BT] == MASK).all()
    assert torch.equal(masked.tokens_BT[~masked.masked_BT], clean.tokens_BT[~masked.masked_BT])


def test_masks_are_a_function_of_seed_block_and_draw(make_run: MakeRun, text: Text) -> None:
    def masks(seed: int, block: int, drawn: int) -> bytes:
        trainer = LocalTrainer(masking(make_run, 0.75), block, text, worker_seed=seed)
        trainer.drawn = drawn
        masked_BT = trainer._draw().masked_BT
        assert masked_BT is not None
        return masked_BT.numpy().tobytes()

    assert masks(1, 1, 7) == masks(1, 1, 7)
    assert len({masks(1, 1, 7), masks(2, 1, 7), masks(1, 0, 7), masks(1, 1, 8)}) == 4


# --- what is learnt ---------------------------------------------------------------------------------


@pytest.mark.parametrize("denoiser", ["evidence", "edm"])
def test_every_block_reads_the_mask_and_is_asked_for_the_byte(
    make_run: MakeRun, text: Text, denoiser: str
) -> None:
    """Loss of the own block and of the one ahead, by hand, on states of the blocks upstream by hand."""
    trainer = LocalTrainer(masking(make_run, 0.75, blocks=3, denoiser=denoiser, lookahead=0.5), 1, text)
    trainer.train(10)
    draw = trainer._draw()
    assert trainer.ahead is not None and draw.ahead is not None and draw.masked_BT is not None
    tokens_BT = torch.where(draw.masked_BT, 256, draw.windows_BT[:, :-1])
    targets_BT, codes_VD = draw.windows_BT[:, 1:], trainer.hop.interface.codes()

    noise_BTD = draw.own.noise_BTD if draw.start_noise_BTD is None else draw.start_noise_BTD
    with torch.no_grad():
        state, _ = trainer.upstream[0].step(tokens_BT, trainer.upstream[0].start(noise_BTD))
    hidden_BTD = upstream_hidden(trainer.upstream, draw, mixed=False)
    torch.testing.assert_close(hidden_BTD, state.hidden_BTD)

    def loss(hop: Hop, hidden_BTD: torch.Tensor, at: object) -> tuple[torch.Tensor, torch.Tensor]:
        sigma_B, denoise = at.sigma_B, hop.denoiser  # type: ignore[attr-defined]
        noisy_BTD = F.embedding(targets_BT, codes_VD) + sigma_B[:, None, None] * at.noise_BTD  # type: ignore[attr-defined]
        hidden_BTD, logits_BTV = hop.predict(tokens_BT, hidden_BTD, noisy_BTD, sigma_B)
        return hidden_BTD, denoise.loss(logits_BTV, noisy_BTD, sigma_B, targets_BT, codes_VD)

    handed_BTD, own = loss(trainer.hop, hidden_BTD, draw.own)
    _, further = loss(trainer.ahead, handed_BTD, draw.ahead)
    minimised, reported = block_loss(trainer.hop, trainer.ahead, draw, hidden_BTD, mixed=False)
    torch.testing.assert_close(reported, own.detach())
    torch.testing.assert_close(minimised, own + 0.5 * further)


def ce_with_suffix_masked(trainer: LocalTrainer, text: Text, known: int) -> tuple[float, float]:
    """From noise through the chain that the trainer holds, nats a byte: after known bytes, after MASK."""
    windows = held_out_windows(text.held_out, 32, WINDOW)
    tokens_BT, targets_BT = windows[:, :-1].clone(), windows[:, 1:]
    tokens_BT[:, known:] = MASK
    hops = [*trainer.upstream, trainer.hop]
    noise_BTD = position_noise(0, 0, WINDOW, 32).expand(len(windows), -1, -1)
    with torch.no_grad():
        state = hops[0].start(noise_BTD)
        for hop in hops:
            state, logits_BTV = hop.step(tokens_BT, state)
    nats_BT = F.cross_entropy(logits_BTV.transpose(1, 2), targets_BT, reduction="none")
    return float(nats_BT[:, :known].mean()), float(nats_BT[:, known:].mean())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: "-".join(recipe.values()))
def test_masked_training_is_better_at_masked_bytes(
    make_run: MakeRun, text: Text, recipe: dict[str, str]
) -> None:
    figures = {}
    for share in (0.0, 0.5):
        trainer = LocalTrainer(masking(make_run, share, **recipe), 1, text)
        trainer.train(60)
        figures[share] = ce_with_suffix_masked(trainer, text, known=8)
    assert figures[0.5][1] < figures[0.0][1] - 0.75
    # After known bytes it is nearly the model of before; half of its windows taught it less about them.
    assert figures[0.5][0] < figures[0.0][0] + 0.6 < 3.0


def test_training_with_masks_can_be_repeated(make_run: MakeRun, text: Text) -> None:
    def losses(share: float) -> list[float]:
        trainer = LocalTrainer(masking(make_run, share), 1, text)
        return [trainer.step() for _ in range(5)]

    assert losses(0.5) == losses(0.5) != losses(0.0)
