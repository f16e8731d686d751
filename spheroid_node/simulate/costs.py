"""What each method asks of one worker: memory, traffic of a round, arithmetic of a token.

Memory and traffic are those of :mod:`spheroid_node.training.plan`. Arithmetic is counted, not estimated: a
step of :mod:`spheroid_node.training.loss` is run on tensors that have a shape and no memory, and the
floating-point operations of its matrix multiplications are added up, 2·m·n·k each. Attention counts the
scores of all pairs of positions, masked or not, as profilers do; what is elementwise (norms, AdamW) counts
nothing.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import lru_cache
from statistics import fmean

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from spheroid_node.model.composed import Hop
from spheroid_node.rounds.outer import payload_elements
from spheroid_node.run import INTERFACE_GROUP, RunSpec
from spheroid_node.simulate.methods import Method
from spheroid_node.training.frozen import frozen_hop
from spheroid_node.training.loss import Draw, Noise, block_loss, upstream_hidden
from spheroid_node.training.plan import DeviceKind, group_elements, plan, traffic
from spheroid_node.wire.tensors import encoded_size


@dataclass(frozen=True)
class WorkerCost:
    """One worker of one block, or the mean of several. Bytes; operations a token that it trains on."""

    parameters: float
    """That it trains: the block's and, unless it is frozen, the interface's."""
    adamw_bytes: float
    """Parameters, gradients and moments: 16 B a parameter."""
    copies_bytes: float
    """Frozen copies of other blocks, in ``chain`` runs: 2 B a parameter."""
    activation_bytes: float
    sent_bytes: float
    """Its updates of a round, compressed. What it leads it does not send."""
    received_bytes: float
    """The new versions of a round, float32: of its groups and of the blocks it copies, from any holder; with
    DiLoCo's momentum, which the next leader needs."""
    leader_bytes: float
    """What leading its groups adds in a round for each other worker of them: updates in, versions out."""
    leader_state_bytes: float
    """What leading its groups adds in memory, however many workers: the sum of the updates, float32, and
    DiLoCo's momentum."""
    forward_flops: float
    backward_flops: float
    """Of its block and the interface, and through the copy of the next block where the run looks ahead."""
    upstream_flops: float
    """Of the copies of the blocks upstream, which are run forward only."""

    @property
    def state_bytes(self) -> float:
        """Memory for parameters and optimiser."""
        return self.adamw_bytes + self.copies_bytes

    @property
    def moved_bytes(self) -> float:
        """In a round, unless it leads."""
        return self.sent_bytes + self.received_bytes

    @property
    def flops(self) -> float:
        return self.forward_flops + self.backward_flops + self.upstream_flops


@dataclass(frozen=True)
class Cost:
    """Of a method on a run. ``worst`` is the last block: it copies all others, so none needs more memory."""

    method: str
    blocks: int
    """Of the run that the method plays."""
    round_tokens: int
    """Tokens that a worker trains in a round, with all its steps."""
    worst: WorkerCost
    mean: WorkerCost
    """Over the blocks."""

    def total_flops(self, tokens: int) -> float:
        """Operations of the whole training, all workers together, of each layer on ``tokens``."""
        return self.mean.flops * self.blocks * tokens


def cost_of(run: RunSpec, method: Method, device_kind: DeviceKind = "cuda") -> Cost:
    """What ``method`` asks of a worker, where blocktrain would play ``run``.

    ``device_kind`` matters for activations: on ``cuda`` most of them are bfloat16.
    """
    played = method.run_of(run)
    costs = [_worker_cost(played, method, block, device_kind) for block in range(played.model.blocks)]
    mean = WorkerCost(*(fmean(values) for values in zip(*map(astuple, costs), strict=True)))
    round_tokens = played.training.local_steps * played.training.batch * played.model.window
    return Cost(method.name, played.model.blocks, round_tokens, costs[-1], mean)


def _worker_cost(played: RunSpec, method: Method, block: int, device_kind: DeviceKind) -> WorkerCost:
    needs, moved = plan(played, block, device_kind), traffic(played, block)
    forward, backward = own_flops(played, block)
    sizes = [group_elements(played, group) for group in played.worker_groups(block)]
    travelling = sum(encoded_size(payload_elements(played.training, size), "float32") for size in sizes)
    linked = 0 if method.alone else 1
    return WorkerCost(
        parameters=sum(sizes),
        adamw_bytes=needs.adamw,
        copies_bytes=needs.upstream,
        activation_bytes=needs.activations,
        sent_bytes=linked * moved.update,
        received_bytes=linked * moved.versions,
        leader_bytes=linked * (moved.update + travelling),
        leader_state_bytes=linked * travelling,
        forward_flops=forward,
        backward_flops=backward,
        upstream_flops=upstream_flops(played, block),
    )


def own_flops(run: RunSpec, block: int) -> tuple[float, float]:
    """Operations a token of a worker's forward and backward pass, without the blocks upstream."""
    # What lies between the first block and the last is alike.
    return _own_flops(run, block if block in (0, run.model.blocks - 1) else 1)


def upstream_flops(run: RunSpec, block: int) -> float:
    """Operations a token of the copies that a worker of ``block`` runs for the hidden state it receives."""
    return sum(_copy_flops(run, min(index, 1)) for index in run.upstream_blocks(block))


@lru_cache(maxsize=64)
def _own_flops(run: RunSpec, block: int) -> tuple[float, float]:
    with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH):
        hop, ahead = Hop(run, block), run.ahead_block(block)
        hop.interface.requires_grad_(INTERFACE_GROUP in run.worker_wholes(block))
        copy = None if ahead is None else frozen_hop(run, ahead, hop.interface, mixed=False)
        draw = _draw(run)
        with FlopCounterMode(display=False) as counter:
            loss, _ = block_loss(hop, copy, draw, draw.own.noise_BTD, mixed=False)
            forward = counter.get_total_flops()
            loss.backward()  # type: ignore[no-untyped-call]
        backward = counter.get_total_flops() - forward
    return forward / run.model.window, backward / run.model.window


@lru_cache(maxsize=64)
def _copy_flops(run: RunSpec, block: int) -> float:
    with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH):
        copy = frozen_hop(run, block, Hop(run, block).interface, mixed=False)
        with FlopCounterMode(display=False) as counter:
            upstream_hidden([copy], _draw(run), mixed=False)
    return float(counter.get_total_flops() / run.model.window)


def _draw(run: RunSpec) -> Draw:
    """Of a batch of one window, with all that any run needs."""
    shape = (1, run.model.window, run.model.width)
    noise = Noise(torch.ones(1), torch.zeros(shape))
    start_noise_BTD = torch.zeros(shape) if run.learning.denoiser == "edm" else None
    return Draw(torch.zeros(1, run.model.window + 1, dtype=torch.int64), noise, noise, start_noise_BTD)
