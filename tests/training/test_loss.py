from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from spheroid_node.model.composed import Hop
from spheroid_node.run import RunSpec
from spheroid_node.training.local import LocalTrainer
from spheroid_node.training.loss import block_loss, upstream_hidden
from spheroid_node.training.text import Text

MakeRun = Callable[..., RunSpec]


def trained(run: RunSpec, block: int, text: Text, steps: int = 10) -> LocalTrainer:
    """Past version 0, so that the head, and with it z after an Euler step, is not trivial."""
    trainer = LocalTrainer(run, block, text)
    trainer.train(steps)
    return trainer


def gradients(trainer: LocalTrainer, ahead: Hop | None, weight: float) -> dict[str, torch.Tensor]:
    """Of one draw, by parameter of the own block and the interface."""
    learning = trainer.run.learning.model_copy(update={"lookahead": weight})
    trainer.hop.run = trainer.run.model_copy(update={"learning": learning})
    draw = trainer._draw()
    hidden_BTD = upstream_hidden(trainer.upstream, draw, mixed=False)
    trainer.hop.zero_grad()
    block_loss(trainer.hop, ahead, draw, hidden_BTD, mixed=False)[0].backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in trainer.hop.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("denoiser", ["evidence", "edm"])
def test_training_sees_the_upstream_state_of_inference(make_run: MakeRun, text: Text, denoiser: str) -> None:
    trainer = trained(make_run(blocks=3, denoiser=denoiser), 2, text)
    draw = trainer._draw()
    noise_BTD = draw.own.noise_BTD if draw.start_noise_BTD is None else draw.start_noise_BTD
    with torch.no_grad():
        state = trainer.upstream[0].start(noise_BTD)
        for hop in trainer.upstream:
            state, _ = hop.step(draw.windows_BT[:, :-1], state)
    hidden_BTD = upstream_hidden(trainer.upstream, draw, mixed=False)
    torch.testing.assert_close(hidden_BTD, state.hidden_BTD)
    assert not hidden_BTD.requires_grad


def test_the_first_block_receives_zeros(run: RunSpec, text: Text) -> None:
    trainer = LocalTrainer(run, 0, text)
    assert not upstream_hidden(trainer.upstream, trainer._draw(), mixed=False).any()


@pytest.mark.parametrize("denoiser", ["evidence", "edm"])
def test_looking_ahead_adds_the_next_blocks_loss(make_run: MakeRun, text: Text, denoiser: str) -> None:
    trainer = trained(make_run(blocks=3, denoiser=denoiser, lookahead=0.5), 1, text)
    assert trainer.ahead is not None
    draw = trainer._draw()
    hidden_BTD = upstream_hidden(trainer.upstream, draw, mixed=False)
    minimised, own = block_loss(trainer.hop, trainer.ahead, draw, hidden_BTD, mixed=False)
    alone, _ = block_loss(trainer.hop, None, draw, hidden_BTD, mixed=False)

    # The next block's loss once more, by hand: at its own σ, on the state that the own block hands on.
    tokens_BT, targets_BT = draw.windows_BT[:, :-1], draw.windows_BT[:, 1:]
    codes_VD, denoise = trainer.hop.interface.codes(), trainer.ahead.denoiser
    assert draw.ahead is not None
    own_noisy_BTD = denoise.add_noise(targets_BT, codes_VD, draw.own.sigma_B, draw.own.noise_BTD)
    handed_BTD, _ = trainer.hop.predict(tokens_BT, hidden_BTD, own_noisy_BTD, draw.own.sigma_B)
    noisy_BTD = denoise.add_noise(targets_BT, codes_VD, draw.ahead.sigma_B, draw.ahead.noise_BTD)
    _, logits_BTV = trainer.ahead.predict(tokens_BT, handed_BTD, noisy_BTD, draw.ahead.sigma_B)
    further = denoise.loss(logits_BTV, noisy_BTD, draw.ahead.sigma_B, targets_BT, codes_VD)

    torch.testing.assert_close(own, alone.detach())
    torch.testing.assert_close(minimised, alone + trainer.run.learning.lookahead * further)
    low, high = trainer.hop.schedule.training_interval(2)
    assert low <= float(draw.ahead.sigma_B.min()) <= float(draw.ahead.sigma_B.max()) <= high


def test_the_noise_of_the_next_block_is_its_own(make_run: MakeRun, text: Text) -> None:
    # With the same ε the hidden state of an `edm` block could tell the next one what to subtract from its z.
    draw = LocalTrainer(make_run(blocks=3, denoiser="edm", lookahead=0.5), 1, text)._draw()
    assert draw.ahead is not None
    assert draw.start_noise_BTD is not None
    noises = [draw.own.noise_BTD, draw.ahead.noise_BTD, draw.start_noise_BTD]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert abs(float((noises[first] * noises[second]).mean())) < 0.05


def test_what_is_ahead_moves_the_own_block_and_not_the_head(make_run: MakeRun, text: Text) -> None:
    trainer = trained(make_run(blocks=3, lookahead=0.5), 1, text)
    without, with_it = gradients(trainer, None, 0.0), gradients(trainer, trainer.ahead, 1.0)
    torch.testing.assert_close(without["interface.head.weight"], with_it["interface.head.weight"])
    name = "block.layers.0.mlp.0.weight"
    assert (without[name] - with_it[name]).norm() > 0.1 * without[name].norm()


def test_no_gradient_and_no_step_reaches_a_copy(make_run: MakeRun, text: Text) -> None:
    trainer = LocalTrainer(make_run(blocks=3, lookahead=0.5), 1, text)
    assert trainer.ahead is not None
    copies = [trainer.ahead.block, trainer.upstream[0].block]
    before = [[p.clone() for p in block.parameters()] for block in copies]
    trainer.train(5)
    for block, old in zip(copies, before, strict=True):
        assert all(p.grad is None and torch.equal(p, q) for p, q in zip(block.parameters(), old, strict=True))
    assert trainer.ahead.interface.head.weight.grad is None


def test_a_copy_sees_the_interface_that_is_trained(make_run: MakeRun, text: Text) -> None:
    trainer = trained(make_run(blocks=3, lookahead=0.5), 1, text)
    assert trainer.ahead is not None
    for hop in (trainer.ahead, *trainer.upstream):
        assert torch.equal(hop.interface.head.weight, trainer.hop.interface.head.weight)
        assert torch.equal(hop.interface.embedding.weight, trainer.hop.interface.embedding.weight)
        assert not any(p.requires_grad for p in hop.parameters())


@pytest.mark.parametrize(
    ("recipe", "block", "ahead"),
    [
        ({"lookahead": 0.5}, 0, 1),
        ({"lookahead": 0.5}, 1, 2),
        ({"lookahead": 0.5}, 2, None),
        ({"lookahead": 0.5, "conditioning": "context"}, 1, None),
        ({}, 1, None),
    ],
)
def test_who_looks_ahead(
    make_run: MakeRun, text: Text, recipe: dict[str, object], block: int, ahead: int | None
) -> None:
    run = make_run(blocks=3, **recipe)
    trainer = LocalTrainer(run, block, text)
    assert (trainer.ahead.index if trainer.ahead else None) == ahead == run.ahead_block(block)
    indices = [hop.index for hop in (*trainer.upstream, *([trainer.ahead] if trainer.ahead else []))]
    assert tuple(run.copied_groups(block)) == tuple(f"block-{index}" for index in indices)
