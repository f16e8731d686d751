"""Local training of one block between two versions (design.md, section 5).

The loss is the block's own; no gradient crosses to another machine. In ``chain`` runs the worker holds frozen
copies of the blocks upstream and runs them for the hidden state that its block receives, and one of the block
after its own if the run looks ahead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from spheroid_node.model.composed import Hop
from spheroid_node.model.initial import initial_vector
from spheroid_node.model.parameters import flatten, part_of_whole, unflatten_
from spheroid_node.model.randomness import stream
from spheroid_node.run import INTERFACE_GROUP, RunSpec, TrainingSpec, block_group, whole_of
from spheroid_node.training.device import resolve_precision
from spheroid_node.training.evaluation import chain_ce
from spheroid_node.training.frozen import bytes_of, frozen_hop
from spheroid_node.training.loss import Draw, Noise, block_loss, upstream_hidden
from spheroid_node.training.optimiser_state import restore_optimiser, save_optimiser
from spheroid_node.training.text import Text, sample_windows, suffix_masks
from spheroid_node.wire.tensors import Vector

MAX_SKIPPED_STEPS = 3
"""Non-finite losses in a row after which a round's training ends."""

FINAL_RATE_SHARE = 0.1

MASKS = 1
"""Third word of the stream that the masks of a draw come from; of its other stream it is 0."""

TIMED_EVERY = 16
"""Steps between two measurements of the time upstream: on a GPU each is a wait."""

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
    upstream_seconds: float
    """Of these, spent in the frozen blocks upstream; estimated from a sample of the steps."""

    def then(self, later: TrainOutcome) -> TrainOutcome:
        """Both as one."""
        steps = self.steps + later.steps
        losses = [part.steps * part.loss for part in (self, later) if part.steps]
        return TrainOutcome(
            steps=steps,
            tokens=self.tokens + later.tokens,
            seconds=self.seconds + later.seconds,
            loss=math.fsum(losses) / steps if steps else math.nan,
            step_seconds=later.step_seconds if later.steps else self.step_seconds,
            upstream_seconds=self.upstream_seconds + later.upstream_seconds,
        )


@dataclass
class _Loaded:
    """The version that a trained group was last set to."""

    vector: Vector
    start: Vector
    """What the next update is measured from: the parameters at :meth:`LocalTrainer.load`, or since then at
    :meth:`LocalTrainer.take`."""
    version: int
    steps: int
    """The group's training steps at that version, which the learning rate goes by."""
    trained: int = 0
    """Local steps that the version does not hold."""
    taken: int = 0
    """Of these, how many were taken for an update."""


class LocalTrainer:
    """Trains ``block`` and, unless it is frozen, the interface; begins with version 0 of all groups.

    What it draws is a function of (worker_seed, block, number of the draw), so training is repeatable and
    resumes exactly.
    """

    def __init__(
        self,
        run: RunSpec,
        block: int,
        text: Text,
        device: str | torch.device = "cpu",
        worker_seed: int = 0,
        precision: str = "float32",
        compiled: bool = False,
    ) -> None:
        """``precision``: see :func:`resolve_precision`. ``compiled``: torch.compile translates the step."""
        run.check_block(block)
        self.run, self.block, self.text, self.worker_seed = run, block, text, worker_seed
        self.device = torch.device(device)
        self.mixed = resolve_precision(precision, self.device)
        self.drawn = 0
        self.hop = Hop(run, block).to(self.device)
        interface = self.hop.interface
        self.upstream = [
            frozen_hop(run, index, interface, self.mixed).to(self.device)
            for index in run.upstream_blocks(block)
        ]
        ahead = run.ahead_block(block)
        self.ahead = None if ahead is None else frozen_hop(run, ahead, interface, self.mixed).to(self.device)
        copies = [*self.upstream, self.ahead] if self.ahead is not None else self.upstream
        self.copied_bytes = sum(bytes_of(hop.block) for hop in copies)
        """What the frozen copies take up."""
        self._upstream_times: list[float] = []
        self._untimed = 0
        self._compiled = compiled
        self._hidden_of, self._loss_of = upstream_hidden, block_loss
        if compiled:
            self._hidden_of = torch.compile(upstream_hidden, dynamic=False)
            self._loss_of = torch.compile(block_loss, dynamic=False)
        self._modules: dict[str, nn.Module] = {
            INTERFACE_GROUP: self.hop.interface,
            **{block_group(hop.index): hop.block for hop in (*copies, self.hop)},
        }
        self.groups = run.worker_groups(block)
        self.wholes = run.worker_wholes(block)
        self.hop.interface.requires_grad_(INTERFACE_GROUP in self.wholes)
        self._parameters = [p for whole in self.wholes for p in self._modules[whole].parameters()]
        self._optimiser = self._build_optimiser()
        self._loaded: dict[str, _Loaded] = {}
        self._loads = 0
        self._before_screen = (-1, 0, math.nan)
        """What :meth:`screen` compares with: number of loads, windows, and the cross-entropy then."""
        for whole in self._modules:
            for group in run.shards_of(whole):
                self.load(group, 0, 0, initial_vector(run, group))

    def load(
        self,
        group: str,
        version: int,
        steps: int,
        vector: Vector,
        left_over: Vector | None = None,
        carry: bool = False,
    ) -> None:
        """Set a group to a version; moments of the optimiser stay. ``steps``: the group's so far.

        A group that is trained here begins with ``left_over`` on top, and with ``carry`` also with what was
        learnt since its last update was taken: θ ← θ_version + left over + (θ − θ_taken) (design.md,
        section 6, point 9). Raises :class:`ValueError` for a group this worker does not hold or a vector of
        another length.
        """
        if whole_of(group) not in self._modules:
            raise ValueError(f"a worker of block {self.block} does not hold the group {group!r}")
        self._loads += 1
        if group not in self.groups:
            self._set(group, vector)
            return
        ahead, trained = self._ahead(group) if carry else (None, 0)
        start = vector.copy() if left_over is None else vector + left_over
        self._set(group, start if ahead is None else start + ahead)
        self._loaded[group] = _Loaded(vector.copy(), start, version, steps, trained)

    def _ahead(self, group: str) -> tuple[Vector | None, int]:
        """What was learnt since the last update, and its steps; nothing if it is not finite."""
        loaded = self._loaded[group]
        ahead = self.update(group)
        # A NaN that were carried on would never go away.
        return (ahead, loaded.trained - loaded.taken) if np.isfinite(ahead).all() else (None, 0)

    def warm_up(self) -> None:
        """Have torch.compile do its work now, if it is to, and not in the first step of a round.

        Where it fails, for want of a C++ compiler say, the log tells, and training goes on without it.
        """
        if not self._compiled:
            return
        try:
            self._losses(self._draw())[0].backward()  # type: ignore[no-untyped-call]
        except Exception as error:  # torch.compile fails in as many ways as there are tool chains
            log.warning("trainer.not_compiled", cause=f"{type(error).__name__}: {error}"[:500])
            self._hidden_of, self._loss_of = upstream_hidden, block_loss
        self._optimiser.zero_grad(set_to_none=True)
        self._upstream_times.clear()

    def step(self) -> float:
        """One optimiser step; returns the block's own loss in nats a byte.

        Raises :class:`NonFiniteLoss` without touching a parameter if loss or gradient is not finite.
        """
        draw = self._draw()
        self.drawn += 1
        for settings in self._optimiser.param_groups:
            settings["lr"] = learning_rate(self.run.training, self._steps(settings["group"]))
        minimised, own = self._losses(draw)
        minimised.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self._parameters, self.run.training.clip_norm)
        value, length = torch.stack((own, norm)).tolist()  # one wait for the device, not two
        finite = math.isfinite(value) and math.isfinite(length)
        if finite:
            self._optimiser.step()
            for loaded in self._loaded.values():
                loaded.trained += 1
        self._optimiser.zero_grad(set_to_none=True)
        if not finite:
            raise NonFiniteLoss(draw.own.sigma_B.tolist(), (self.worker_seed, self.block, self.drawn - 1))
        return float(value)

    def train(self, max_steps: int, should_stop: Callable[[], bool] = lambda: False) -> TrainOutcome:
        """Up to ``max_steps`` steps, until ``should_stop``.

        A step whose loss is not finite is skipped; after three in a row the training of the round ends, and
        :class:`NonFiniteLoss` is raised if it had not begun.
        """
        losses: list[float] = []
        self._upstream_times.clear()
        self._untimed = 0
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
        upstream = self._upstream_times
        return TrainOutcome(
            steps=steps,
            tokens=steps * self.run.training.batch * self.run.model.window,
            seconds=seconds,
            loss=math.fsum(losses) / steps if steps else math.nan,
            step_seconds=seconds / steps if steps else math.nan,
            upstream_seconds=steps * math.fsum(upstream) / len(upstream) if upstream else 0.0,
        )

    def update(self, group: str) -> Vector:
        """What a group has learnt since it was loaded or its last update taken: float32 [elements]."""
        vector = self._get(group)
        vector -= self._loaded[group].start
        return vector

    def take(self, group: str) -> Vector:
        """:meth:`update`; the next one is measured from here, and training can go on meanwhile."""
        loaded = self._loaded[group]
        now = self._get(group)
        update: Vector = now - loaded.start
        loaded.start, loaded.taken = now, loaded.trained
        return update

    def reset_moments(self) -> None:
        """Forget the optimiser's moments, as a client without state does between two rounds."""
        self._optimiser.state.clear()

    def evaluate(self, windows: Tensor, seed: int = 0) -> list[float]:
        """From-noise cross-entropy (nats a byte) on [count, window + 1] windows, after every block held.

        In ``chain`` runs blocks 0 to own; in ``context`` runs the own block alone, from noise at its σ.
        """
        return chain_ce([*self.upstream, self.hop], windows, seed)

    def evaluate_versions(self, windows: Tensor) -> list[float]:
        """:meth:`evaluate`, but of the versions that were loaded, without what was learnt on top of them."""
        with self._at({group: self._loaded[group].vector for group in self.groups}):
            return self.evaluate(windows)

    def is_at(self, group: str, version: int) -> bool:
        """Whether ``group`` is trained here and was last loaded at ``version``."""
        return group in self._loaded and self._loaded[group].version == version

    def screen(self, group: str, update: Vector, windows: Tensor) -> float | None:
        """By how much ``update`` makes the last figure of :meth:`evaluate_versions` worse.

        NaN or infinite if it ruins it. None if the version is ruined already: anything may be better.
        """
        key = (self._loads, len(windows))
        if self._before_screen[:2] != key:
            self._before_screen = (*key, self.evaluate_versions(windows)[-1])
        if not math.isfinite(self._before_screen[2]):
            return None
        tried = {other: self._loaded[other].vector for other in self.groups}
        tried[group] = tried[group] + update
        with self._at(tried):
            return self.evaluate(windows)[-1] - self._before_screen[2]

    @contextmanager
    def _at(self, vectors: Mapping[str, Vector]) -> Iterator[None]:
        """With these parameters, for as long as it lasts."""
        kept = {group: self._get(group) for group in vectors}
        try:
            for group, vector in vectors.items():
                self._set(group, vector)
            yield
        finally:
            for group, vector in kept.items():
                self._set(group, vector)

    def _get(self, group: str) -> Vector:
        """A copy of the parameters of a group as they are now: float32 [elements]."""
        return flatten(self._modules[whole_of(group)], part_of_whole(self.run, group))

    def _set(self, group: str, vector: Vector) -> None:
        unflatten_(self._modules[whole_of(group)], vector, part_of_whole(self.run, group))

    def save(self, path: Path) -> None:
        """Store moments and counters. Raises :class:`OSError`, and then nothing has changed on disk."""
        save_optimiser(path, self.run, self.block, self._named_parameters(), self._optimiser, self.drawn)

    def restore(self, path: Path) -> None:
        """Go on where :meth:`save` was; parameters come by :meth:`load`.

        Raises :class:`CheckpointInvalid` for a damaged file or one of another block, :class:`RunMismatch`
        for one of another run, and then nothing has changed.
        """
        self.drawn = restore_optimiser(path, self.run, self.block, self._named_parameters(), self._optimiser)

    def _build_optimiser(self) -> torch.optim.AdamW:
        training = self.run.training
        matrices = [p for p in self.hop.block.parameters() if p.ndim >= 2]
        vectors = [p for p in self.hop.block.parameters() if p.ndim < 2]
        own = block_group(self.block)
        settings = [
            {"params": matrices, "weight_decay": training.weight_decay, "group": own},
            {"params": vectors, "weight_decay": 0.0, "group": own},
        ]
        if INTERFACE_GROUP in self.wholes:
            interface = list(self.hop.interface.parameters())
            settings.append({"params": interface, "weight_decay": 0.0, "group": INTERFACE_GROUP})
        return torch.optim.AdamW(
            settings, lr=training.learning_rate, betas=(training.beta1, training.beta2), fused=True
        )

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{whole}.{name}": parameter
            for whole in self.wholes
            for name, parameter in self._modules[whole].named_parameters()
        }

    def _steps(self, whole: str) -> int:
        """Training steps behind a block or the interface: of its shards, those of the one that has most."""
        loaded = [self._loaded[group] for group in self.run.shards_of(whole)]
        return max(shard.steps + shard.trained for shard in loaded)

    def _draw(self) -> Draw:
        model, batch = self.run.model, self.run.training.batch
        source = stream(self.worker_seed, self.block, self.drawn)
        windows_BT = sample_windows(self.text.train, batch, model.window, source)
        uniform_B = torch.from_numpy(source.random(batch, dtype="float32"))
        generator = torch.Generator(self.device).manual_seed(int(source.integers(2**63)))

        def normal() -> Tensor:
            shape = (batch, model.window, model.width)
            return torch.randn(shape, generator=generator, device=self.device)

        def noise(hop: Hop, uniform_B: Tensor) -> Noise:
            sigma_B = hop.schedule.sample(hop.index, uniform_B)
            return Noise(sigma_B.to(self.device, non_blocking=True), normal())

        own = noise(self.hop, uniform_B)
        start_noise_BTD = normal() if self.upstream and self.hop.denoiser.reads_noise else None
        ahead = None
        if self.ahead is not None:
            ahead = noise(self.ahead, torch.from_numpy(source.random(batch, dtype="float32")))
        windows_BT = windows_BT.to(self.device, non_blocking=True)
        return Draw(windows_BT, own, ahead, start_noise_BTD, self._masks())

    def _masks(self) -> Tensor | None:
        """Masked inputs of the draw, from a stream of their own: all else is drawn as without them."""
        share, batch = self.run.training.mask_suffix, self.run.training.batch
        if not share:
            return None
        source = stream(self.worker_seed, self.block, self.drawn, MASKS)
        masked_BT = suffix_masks(share, batch, self.run.model.window, source)
        return masked_BT.to(self.device, non_blocking=True)

    def _losses(self, draw: Draw) -> tuple[Tensor, Tensor]:
        timed = bool(self.upstream) and self._untimed % TIMED_EVERY == 0
        self._untimed += 1
        begun = self._wait_and_read_clock() if timed else 0.0
        hidden_BTD = self._hidden_of(self.upstream, draw, self.mixed)
        if timed:
            self._upstream_times.append(self._wait_and_read_clock() - begun)
        return self._loss_of(self.hop, self.ahead, draw, hidden_BTD, self.mixed)

    def _wait_and_read_clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


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
