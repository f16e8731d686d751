"""What owning a block asks of a machine: memory while it trains, bytes it sends and fetches in a round.

Everything is computed from the modules that train, on fake tensors that have a shape and no memory, so that
a block of any size is planned in a second. Activations are not estimated by a formula: forward and backward
pass of a training step are run on those tensors, and the bytes alive at the worst moment counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spheroid_node.model.composed import Hop
from spheroid_node.model.parameters import elements
from spheroid_node.rounds.outer import payload_elements
from spheroid_node.run import INTERFACE_GROUP, RunSpec, block_group, whole_of
from spheroid_node.training.frozen import FrozenBlock, bytes_of, frozen_hop, half_dtype
from spheroid_node.training.loss import Draw, Noise, block_loss, upstream_hidden
from spheroid_node.wire.tensors import encoded_size

DeviceKind = Literal["cpu", "cuda"]

GIB = 2**30
FLOAT32_BYTES = 4
MOMENT_BYTES = 2 * FLOAT32_BYTES
"""AdamW's two moments of a parameter."""

CARD_OVERHEAD = GIB
"""What a card's memory does not give to tensors: the CUDA context with its kernels, workspaces of matrix
multiplication, what PyTorch's allocator rounds up and leaves between tensors. An allowance, not measured."""

CPU_FACTOR = 1.5
"""What a trainer process on a CPU was seen to take, of what is planned."""

FIRST, SECOND = block_group(0), block_group(1)

MEASURED_LAYERS = 8
"""Deeper blocks are not run: each further layer adds what one of the second half of these adds."""


@dataclass(frozen=True)
class Needs:
    """Memory of one worker while it trains a block, in bytes."""

    parameters: int
    """The block and the interface, float32."""
    gradients: int
    optimiser: int
    """AdamW's two moments."""
    upstream: int
    """Frozen copies of the blocks upstream (``chain``) and of the next one (look-ahead): 2 B a parameter."""
    activations: int
    """What forward and backward pass hold beyond all that at their worst moment, temporaries included."""
    version: int
    """The version that updates are differences from, float32; 0 where it is not on the device."""

    @property
    def adamw(self) -> int:
        """Parameters, gradients and moments: what the paper calls AdamW state, 16 B a parameter."""
        return self.parameters + self.gradients + self.optimiser

    @property
    def total(self) -> int:
        return self.adamw + self.upstream + self.activations + self.version


@dataclass(frozen=True)
class Traffic:
    """Bytes that one worker moves in a round in which all groups gain a version."""

    update: int
    """Sent: the updates of the block and of the interface, compressed."""
    versions: int
    """Fetched: the new versions of what it trains and of the blocks that it has copies of, float32; where the
    outer step has momentum, that too."""


def plan(run: RunSpec, block: int, device_kind: DeviceKind = "cuda", mixed: bool | None = None) -> Needs:
    """Memory that a worker of ``block`` needs. Raises :class:`NoSuchBlock`.

    ``mixed``: matrices are multiplied in bfloat16; by default so on ``cuda``, not on ``cpu``. The operators
    are those that a CPU runs, uncompiled: fused ones of a GPU or of ``torch.compile`` keep less.
    """
    run.check_block(block)
    mixed = device_kind == "cuda" if mixed is None else mixed
    trained = sum(group_elements(run, whole) for whole in run.worker_wholes(block))
    held = group_elements(run, block_group(block)) + group_elements(run, INTERFACE_GROUP)
    return Needs(
        parameters=FLOAT32_BYTES * held,
        gradients=FLOAT32_BYTES * trained,
        optimiser=MOMENT_BYTES * trained,
        upstream=_sum_of_blocks(partial(_frozen_bytes, run, mixed), _copied(run, block)),
        activations=_activation_bytes(
            run, min(block, 1), run.ahead_block(block) is not None, device_kind, mixed
        ),
        version=FLOAT32_BYTES * trained if device_kind == "cpu" else 0,
    )


def full_replica(run: RunSpec, device_kind: DeviceKind = "cuda") -> Needs:
    """Memory to train all blocks end to end: what a worker needs where whole models are averaged."""
    return plan(end_to_end(run), 0, device_kind)


def end_to_end(run: RunSpec) -> RunSpec:
    """The plain causal model of the run's whole depth, as a single block."""
    model = run.model.model_copy(update={"blocks": 1, "layers": run.model.blocks * run.model.layers})
    learning = run.learning.model_copy(update={"denoiser": "plain", "readout": "last"})
    return run.model_copy(update={"model": model, "learning": learning, "interface": "shared"})


def fits(needs: Needs, gib: float) -> bool:
    """Whether a card of ``gib`` GiB holds ``needs`` beside :data:`CARD_OVERHEAD`."""
    return needs.total + CARD_OVERHEAD <= gib * GIB


def fitting_blocks(run: RunSpec, kind: DeviceKind, mixed: bool, free: int) -> frozenset[int]:
    """Blocks that a machine with ``free`` bytes on its device can train."""
    needed = {block: plan(run, block, kind, mixed).total for block in range(run.model.blocks)}
    if kind == "cuda":
        return frozenset(block for block, total in needed.items() if total + CARD_OVERHEAD <= free)
    return frozenset(block for block, total in needed.items() if CPU_FACTOR * total <= free)


def traffic(run: RunSpec, block: int, compression: str | None = None) -> Traffic:
    """Bytes that a worker of ``block`` moves in a round; ``compression`` of updates, if not the run's.

    Raises :class:`NoSuchBlock`.
    """
    run.check_block(block)
    groups = run.worker_groups(block)
    trained = [group_elements(run, group) for group in groups]
    copied = _sum_of_blocks(partial(group_elements, run), _copied(run, block))
    return Traffic(
        update=sum(encoded_size(size, compression or run.round.compression) for size in trained),
        versions=encoded_size(payload_elements(run.training, sum(trained) + copied), "float32"),
    )


def total_elements(run: RunSpec) -> int:
    """Parameters of the composed model."""
    blocks = tuple(block_group(index) for index in range(run.model.blocks))
    return _sum_of_blocks(partial(group_elements, run), blocks) + group_elements(run, INTERFACE_GROUP)


def group_elements(run: RunSpec, group: str) -> int:
    """Parameters of ``group``. All blocks after block 0 have one shape, so that only one is ever built."""
    whole = whole_of(group)
    built = whole if whole in (INTERFACE_GROUP, FIRST) else SECOND
    return elements(run, built + group.removeprefix(whole))


def _copied(run: RunSpec, block: int) -> tuple[str, ...]:
    return tuple(map(block_group, run.copied_blocks(block)))


def _sum_of_blocks(size: Callable[[str], int], groups: Sequence[str]) -> int:
    """Sum of ``size`` over blocks, of which all but block 0 are alike."""
    first = groups.count(FIRST)
    alike = len(groups) - first
    return (size(FIRST) if first else 0) + (alike * size(SECOND) if alike else 0)


@lru_cache(maxsize=64)
def _frozen_bytes(run: RunSpec, mixed: bool, group: str) -> int:
    """Bytes of a frozen copy of a block."""
    with torch.device("meta"):
        return bytes_of(FrozenBlock(run, 0 if group == FIRST else 1, half_dtype(mixed)))


# --- activations ----------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _activation_bytes(
    run: RunSpec, block: int, looks_ahead: bool, device_kind: DeviceKind, mixed: bool
) -> int:
    """Bytes of a step beyond parameters, frozen copies and all gradients, at the worst moment.

    While gradients appear activations go, so this is less than the sum of all activations.
    """

    def peak(layers: int) -> int:
        shallow = run.model.model_copy(update={"layers": layers})
        return _peak_bytes(run.model_copy(update={"model": shallow}), block, looks_ahead, device_kind, mixed)

    layers = run.model.layers
    most = peak(min(layers, MEASURED_LAYERS))
    if layers > MEASURED_LAYERS:
        half = MEASURED_LAYERS // 2
        most += (layers - MEASURED_LAYERS) * (most - peak(half)) // half
    trained = sum(group_elements(run, whole) for whole in run.worker_wholes(block))
    return most - FLOAT32_BYTES * trained


def _peak_bytes(run: RunSpec, block: int, looks_ahead: bool, device_kind: DeviceKind, mixed: bool) -> int:
    """Most bytes alive during draw, forward and backward pass: gradients included, parameters left out."""
    with FakeTensorMode():
        hop = Hop(run, block)
        hop.interface.requires_grad_(INTERFACE_GROUP in run.worker_wholes(block))
        upstream = [frozen_hop(run, index, hop.interface, mixed) for index in run.upstream_blocks(block)]
        ahead = frozen_hop(run, block + 1, hop.interface, mixed) if looks_ahead else None
        alive = _AliveBytes(nn.ModuleList([hop, *upstream, *([ahead] if ahead else [])]))
        with _HalfAttention() if mixed and device_kind == "cuda" else nullcontext(), alive:
            draw = _draw(run, bool(upstream) and hop.denoiser.reads_noise, looks_ahead)
            minimised, _ = block_loss(hop, ahead, draw, upstream_hidden(upstream, draw, mixed), mixed)
            minimised.backward()  # type: ignore[no-untyped-call]
    return alive.peak


def _draw(run: RunSpec, from_start: bool, looks_ahead: bool) -> Draw:
    batch, window = run.training.batch, run.model.window

    def noise_BTD() -> Tensor:
        return torch.zeros(batch, window, run.model.width)

    return Draw(
        windows_BT=torch.zeros(batch, window + 1, dtype=torch.int64),
        own=Noise(torch.ones(batch), noise_BTD()),
        ahead=Noise(torch.ones(batch), noise_BTD()) if looks_ahead else None,
        start_noise_BTD=noise_BTD() if from_start else None,
        masked_BT=torch.ones(batch, window, dtype=torch.bool) if run.training.mask_suffix else None,
    )


class _AliveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that operators make, for as long as each lives.

    What an operator allocates and frees within itself is not seen.
    """

    def __init__(self, given: nn.Module) -> None:
        """``given``: has the tensors that count for nothing."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._known = {tensor.untyped_storage()._cdata: 0 for tensor in given.parameters()}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata  # the same for all views of a tensor
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now -= self._known.pop(key)


class _HalfAttention(TorchFunctionMode):
    """Has attention computed in bfloat16, as on a GPU: on a CPU the model widens what attention reads."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            args = tuple(arg.bfloat16() for arg in args)
        return func(*args, **(kwargs or {}))
