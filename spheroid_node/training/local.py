"""Local training of one block between two versions (design.md, section 5).

The loss is the block's own; no gradient crosses to another block. In ``chain`` runs the worker holds frozen
copies of the blocks upstream and runs them for the hidden state that its block receives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from torch import Tensor, nn

from spheroid_node.model.composed import Hop
from spheroid_node.model.initial import initial_vector
from spheroid_node.model.parameters import flatten, unflatten_
from spheroid_node.model.randomness import stream
from spheroid_node.run import INTERFACE_GROUP, RunSpec, TrainingSpec, block_group
from spheroid_node.training.evaluation import chain_ce, mixed_precision
from spheroid_node.training.optimiser_state import restore_optimiser, save_optimiser
from spheroid_node.training.text import Text, sample_windows
from spheroid_node.wire.tensors import Vector

MAX_SKIPPED_STEPS = 3
"""Non-finite losses in a row after which a round's training ends."""

FINAL_RATE_SHARE = 0.1

log = structlog.get_logger()


class NonFiniteLoss(ArithmeticError):
    """A step was given up because its loss or gradient was not finite; no parameter was touched."""

    def __init__(self, sigma: list[float], seed: tuple[int, int, int]) -> None:
        super().__init__(f"loss or gradient not finite (σ {min(sigma):.3g} to {max(sigma):.3g}, draw {seed})")
        self.sigma = sigma
        self.seed = seed


@dataclass(frozen=True)
class TrainOutcome:
    """What a worker did in a round; ``loss`` is the mean over its steps, NaN without any."""

    steps: int
    tokens: int
    seconds: float
    loss: float
    step_seconds: float


@dataclass(frozen=True)
class Draw:
    """All that is random in one step."""

    windows_BT: Tensor
    sigma_B: Tensor
    noise_BTD: Tensor
    upstream_noise_BTD: Tensor | None
    """ε that the chain upstream starts from; None where it does not read z."""


@dataclass
class _Loaded:
    """The version that a trained group was last set to."""

    vector: Vector
    version: int
    steps: int
    """The group's training steps at that version, which the learning rate goes by."""
    trained: int = 0
    """Local steps since."""


class LocalTrainer:
    """Trains ``block`` and, unless it is frozen, the interface; begins with version 0 of all groups.

    What it draws is a function of (worker_seed, block, number of the draw), so training is repeatable and
    resumes exactly.
    """

    def __init__(
        self, run: RunSpec, block: int, text: Text, device: str | torch.device = "cpu", worker_seed: int = 0
    ) -> None:
        run.check_block(block)
        self.run, self.block, self.text, self.worker_seed = run, block, text, worker_seed
        self.device = torch.device(device)
        self.drawn = 0
        self.hop = Hop(run, block).to(self.device)
        first = 0 if run.learning.conditioning == "chain" else block
        self.upstream = [self._frozen_hop(index) for index in range(first, block)]
        self._modules: dict[str, nn.Module] = {
            INTERFACE_GROUP: self.hop.interface,
            **{block_group(hop.index): hop.block for hop in (*self.upstream, self.hop)},
        }
        self.groups = run.worker_groups(block)
        self.hop.interface.requires_grad_(INTERFACE_GROUP in self.groups)
        self._parameters = [p for group in self.groups for p in self._modules[group].parameters()]
        self._optimiser = self._build_optimiser()
        self._loaded: dict[str, _Loaded] = {}
        for group in self._modules:
            self.load(group, 0, 0, initial_vector(run, group))

    def load(self, group: str, version: int, steps: int, vector: Vector) -> None:
        """Set a group to a version; moments of the optimiser stay. ``steps``: the group's so far.

        Raises :class:`ValueError` for a group this worker does not hold or a vector of another length.
        """
        if group not in self._modules:
            raise ValueError(f"a worker of block {self.block} does not hold the group {group!r}")
        unflatten_(self._modules[group], vector)
        if group in self.groups:
            self._loaded[group] = _Loaded(vector.copy(), version, steps)

    def step(self) -> float:
        """One optimiser step; returns its loss in nats a byte.

        Raises :class:`NonFiniteLoss` without touching a parameter if loss or gradient is not finite.
        """
        draw = self._draw()
        self.drawn += 1
        for settings in self._optimiser.param_groups:
            loaded = self._loaded[settings["group"]]
            settings["lr"] = learning_rate(self.run.training, loaded.steps + loaded.trained)
        loss = self._loss(draw)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self._parameters, self.run.training.clip_norm)
        value, length = torch.stack((loss.detach(), norm)).tolist()  # one wait for the device, not two
        finite = math.isfinite(value) and math.isfinite(length)
        if finite:
            self._optimiser.step()
            for loaded in self._loaded.values():
                loaded.trained += 1
        self._optimiser.zero_grad(set_to_none=True)
        if not finite:
            raise NonFiniteLoss(draw.sigma_B.tolist(), (self.worker_seed, self.block, self.drawn - 1))
        return float(value)

    def train(self, max_steps: int, should_stop: Callable[[], bool] = lambda: False) -> TrainOutcome:
        """Up to ``max_steps`` steps, until ``should_stop``.

        A step whose loss is not finite is skipped; after three in a row the training of the round ends, and
        :class:`NonFiniteLoss` is raised if it had not begun.
        """
        losses: list[float] = []
        begun, skipped = time.perf_counter(), 0
        while len(losses) < max_steps and not should_stop():
            try:
                losses.append(self.step())
                skipped = 0
            except NonFiniteLoss as error:
                skipped += 1
                log.warning("trainer.step_skipped", cause=str(error), in_a_row=skipped)
                if skipped == MAX_SKIPPED_STEPS and not losses:
                    raise
                if skipped == MAX_SKIPPED_STEPS:
                    break
        seconds, steps = time.perf_counter() - begun, len(losses)
        return TrainOutcome(
            steps=steps,
            tokens=steps * self.run.training.batch * self.run.model.window,
            seconds=seconds,
            loss=math.fsum(losses) / steps if steps else math.nan,
            step_seconds=seconds / steps if steps else math.nan,
        )

    def update(self, group: str) -> Vector:
        """θ_local − θ_loaded of a group this worker trains: float32 [elements]."""
        vector = flatten(self._modules[group])
        vector -= self._loaded[group].vector
        return vector

    def evaluate(self, windows: Tensor, seed: int = 0) -> list[float]:
        """From-noise cross-entropy (nats a byte) on [count, window + 1] windows, after every block held.

        In ``chain`` runs blocks 0 to own; in ``context`` runs the own block alone, from noise at its σ.
        """
        return chain_ce([*self.upstream, self.hop], windows, seed)

    def save(self, path: Path) -> None:
        """Store moments and counters. Raises :class:`OSError`, and then nothing has changed on disk."""
        save_optimiser(path, self.run, self.block, self._named_parameters(), self._optimiser, self.drawn)

    def restore(self, path: Path) -> None:
        """Go on where :meth:`save` was; parameters come by :meth:`load`.

        Raises :class:`CheckpointInvalid` for a damaged file or one of another block, :class:`RunMismatch`
        for one of another run, and then nothing has changed.
        """
        self.drawn = restore_optimiser(path, self.run, self.block, self._named_parameters(), self._optimiser)

    def _frozen_hop(self, index: int) -> Hop:
        hop = Hop(self.run, index, interface=self.hop.interface).to(self.device)
        hop.block.requires_grad_(False)
        if self.device.type == "cuda":
            hop.block.to(torch.bfloat16)
        return hop

    def _build_optimiser(self) -> torch.optim.AdamW:
        training = self.run.training
        matrices = [p for p in self.hop.block.parameters() if p.ndim >= 2]
        vectors = [p for p in self.hop.block.parameters() if p.ndim < 2]
        own = block_group(self.block)
        settings = [
            {"params": matrices, "weight_decay": training.weight_decay, "group": own},
            {"params": vectors, "weight_decay": 0.0, "group": own},
        ]
        if INTERFACE_GROUP in self.groups:
            interface = list(self.hop.interface.parameters())
            settings.append({"params": interface, "weight_decay": 0.0, "group": INTERFACE_GROUP})
        return torch.optim.AdamW(
            settings, lr=training.learning_rate, betas=(training.beta1, training.beta2), fused=True
        )

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{group}.{name}": parameter
            for group in self.groups
            for name, parameter in self._modules[group].named_parameters()
        }

    def _draw(self) -> Draw:
        model, batch = self.run.model, self.run.training.batch
        source = stream(self.worker_seed, self.block, self.drawn)
        windows_BT = sample_windows(self.text.train, batch, model.window, source)
        uniform_B = torch.from_numpy(source.random(batch, dtype="float32"))
        generator = torch.Generator(self.device).manual_seed(int(source.integers(2**63)))
        shape = (batch, model.window, model.width)
        noise = [torch.randn(shape, generator=generator, device=self.device)]
        if self.upstream and self.hop.denoiser.reads_noise:
            noise.append(torch.randn(shape, generator=generator, device=self.device))
        return Draw(
            windows_BT=windows_BT.to(self.device, non_blocking=True),
            sigma_B=self.hop.schedule.sample(self.block, uniform_B).to(self.device, non_blocking=True),
            noise_BTD=noise[0],
            upstream_noise_BTD=noise[1] if len(noise) > 1 else None,
        )

    def _loss(self, draw: Draw) -> Tensor:
        denoiser, tokens_BT, targets_BT = self.hop.denoiser, draw.windows_BT[:, :-1], draw.windows_BT[:, 1:]
        codes_VD = self.hop.interface.codes()
        noisy_BTD = denoiser.add_noise(targets_BT, codes_VD, draw.sigma_B, draw.noise_BTD)
        with mixed_precision(self.device):
            hidden_BTD = self._upstream_hidden(tokens_BT, draw)
            _, logits_BTV = self.hop.predict(tokens_BT, hidden_BTD, noisy_BTD, draw.sigma_B)
        return denoiser.loss(logits_BTV.float(), noisy_BTD, draw.sigma_B, targets_BT, codes_VD)

    @torch.no_grad()
    def _upstream_hidden(self, tokens_BT: Tensor, draw: Draw) -> Tensor:
        """Hidden state that the own block receives, [B, T, width]: what it would be at inference."""
        if draw.upstream_noise_BTD is not None:
            state = self.upstream[0].start(draw.upstream_noise_BTD)
            for hop in self.upstream:
                state, _ = hop.step(tokens_BT, state)
            return state.hidden_BTD
        hidden_BTD = torch.zeros_like(draw.noise_BTD)
        embedded_BTD = self.hop.interface.embedding(tokens_BT)
        for hop in self.upstream:
            # These blocks do not read z, so its place is taken by what is at hand, and neither head nor
            # Euler step is needed: an eighth of their arithmetic.
            hidden_BTD = hop.block(embedded_BTD, hidden_BTD, hidden_BTD, draw.sigma_B)
        return hidden_BTD


def learning_rate(training: TrainingSpec, step: int) -> float:
    """Rate of a group's step number ``step``: linear warm-up, then constant or a cosine to a tenth."""
    rate = training.learning_rate
    if step < training.warmup_steps:
        return rate * (step + 1) / training.warmup_steps
    if not training.decay_steps:
        return rate
    progress = min(1.0, (step - training.warmup_steps) / training.decay_steps)
    share = FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * (1 + math.cos(math.pi * progress)) / 2
    return rate * share
