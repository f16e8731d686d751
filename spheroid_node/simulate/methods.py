"""The methods that block-local learning is compared with: the same swarm, the same text, another run.

``blocktrain`` plays a run as it is. Every other method is a function from that run to one with a single
block, trained by the loss of an ordinary language model (denoiser ``plain``), and goes through the same
rounds, the same trainer and the same AdamW with the same weight decay and learning rate. So a full replica
is a replica of block 0 of a model of one block, and the methods differ in how many steps a round has, in
whether a worker keeps AdamW's moments from round to round, and in what is made of the mean update.

The inner rule is AdamW throughout, also where the paper of a method had plain SGD: what is compared is what
is sent and when, not optimisers. All workers take part in every round.

**Same tokens, same arithmetic.** ``tokens`` always means the tokens that each layer of the final model was
trained on, summed over its replicas. For B blocks of L layers on N tokens that is B·L·N layer-tokens,
whichever method does it: blocktrain trains L layers on N tokens in each of B blocks; the one worker of
``end-to-end``, or all full replicas together, train B·L layers on N tokens. ``one-block`` has L layers, and
so a B-th of it. Beyond the layers the methods differ, as :mod:`spheroid_node.simulate.costs` counts: in
blocktrain every block trains the interface, and with ``chain`` a worker runs the blocks upstream forward.

**Same time.** A step through B·L layers takes a machine B times as long as one through L, and an update of
as many parameters B times as long to send. So the rounds of a full replica are B times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spheroid_node.run import RunSpec
from spheroid_node.training.plan import end_to_end

LOCAL_SGD_ROUNDS = 8
"""Local SGD averages this many times as often as FedAvg and DiLoCo, or more where that does not divide."""


@dataclass(frozen=True)
class Method:
    """How a run is trained; see the module for what all methods have in common."""

    name: str
    summary: str
    run_of: Callable[[RunSpec], RunSpec]
    """The run that is played in place of the given one."""
    alone: bool = False
    """One worker trains, and nothing is sent."""
    keeps_moments: bool = True
    """Whether AdamW's moments outlive a round; if not, every round begins with none."""

    def workers(self, available: int) -> int:
        """Of ``available`` machines, how many train."""
        return 1 if self.alone else available

    def replicas(self, run: RunSpec, workers: int) -> float:
        """Workers that train each layer of ``run``, as this method plays it on ``workers`` machines."""
        return self.workers(workers) / self.run_of(run).model.blocks

    def scheduled(self, run: RunSpec, workers: int) -> RunSpec:
        """:attr:`run_of` ``run``, with warm-up and decay over the same tokens as blocktrain's.

        Both count a group's steps, and in a step a group of R replicas sees R batches. With a constant rate
        and no warm-up this is ``run_of`` itself.
        """
        played = self.run_of(run)
        share = BLOCKTRAIN.replicas(run, workers) / self.replicas(run, workers)
        steps = {
            "warmup_steps": round(run.training.warmup_steps * share),
            # Zero would mean no decay at all.
            "decay_steps": max(1, round(run.training.decay_steps * share)) if run.training.decay_steps else 0,
        }
        return played.model_copy(update={"training": played.training.model_copy(update=steps)})


def tokens_a_round(method: Method, run: RunSpec, workers: int) -> int:
    """Tokens that each layer is trained on in a round in which all ``workers`` make all their steps.

    Raises :class:`ValueError` unless every block has as many workers as every other.
    """
    played, training = method.run_of(run), method.workers(workers)
    if training % played.model.blocks:
        raise ValueError(f"{training} workers on {played.model.blocks} blocks: some blocks see more tokens")
    steps = training // played.model.blocks * played.training.local_steps
    return steps * played.training.batch * played.model.window


def rounds_for(method: Method, run: RunSpec, workers: int, tokens: int) -> int:
    """Rounds after which each layer of the final model has been trained on ``tokens``, summed over replicas.

    At this many rounds of each method the arithmetic in all layers together agrees, layer-tokens for
    layer-tokens (``one-block``: a B-th of it), provided that all workers make all their steps (lockstep).
    Raises :class:`ValueError` if ``tokens`` are no whole number of rounds; :func:`common_tokens` are, of all
    methods.
    """
    a_round = tokens_a_round(method, run, workers)
    if tokens <= 0 or tokens % a_round:
        raise ValueError(
            f"{tokens} tokens are no whole number of rounds of {method.name}, "
            f"which have {a_round} with {workers} workers"
        )
    return tokens // a_round


def common_tokens(run: RunSpec, workers: int, tokens: int) -> int:
    """The number of tokens nearest to ``tokens`` that every method trains in whole rounds, and not 0."""
    # A round of FedAvg is the longest, and whole rounds of every other method fit into it.
    unit = tokens_a_round(METHODS["fedavg"], run, workers)
    return max(1, round(tokens / unit)) * unit


def _one_block(run: RunSpec) -> RunSpec:
    one = run.model_copy(update={"model": run.model.model_copy(update={"blocks": 1})})
    return _alone(_replica(one))


def _end_to_end(run: RunSpec) -> RunSpec:
    return _alone(_full_depth(run))


def _full_depth(run: RunSpec) -> RunSpec:
    return _slower(_replica(run), run.model.blocks)


def _with_momentum(run: RunSpec) -> RunSpec:
    """Full replicas with DiLoCo's outer step; rate and momentum are the run's."""
    return _with_training(_full_depth(run), outer="nesterov")


def _averaged_often(run: RunSpec) -> RunSpec:
    """A full replica whose rounds have a divisor of ``local_steps``, so that FedAvg's hold whole ones."""
    full, steps = _full_depth(run), run.training.local_steps
    most = max(1, steps // LOCAL_SGD_ROUNDS)
    fewer = max(divisor for divisor in range(1, most + 1) if not steps % divisor)
    return _slower(_with_training(full, local_steps=fewer), fewer / steps)


def _replica(run: RunSpec) -> RunSpec:
    """The plain model of all of ``run``'s layers; updates are averaged as in the papers, none is clipped."""
    return _with_training(_with_round(end_to_end(run), aggregation="mean"), outer="average")


def _alone(run: RunSpec) -> RunSpec:
    # A worker that sends its update to nobody has no reason to round it to 16 bits.
    return _with_round(run, compression="float32")


def _slower(run: RunSpec, factor: float) -> RunSpec:
    """Rounds ``factor`` times as long, settling part and all."""
    return _with_round(run, period=run.round.period * factor, settle=run.round.settle * factor)


def _with_training(run: RunSpec, **changes: object) -> RunSpec:
    return run.model_copy(update={"training": run.training.model_copy(update=changes)})


def _with_round(run: RunSpec, **changes: object) -> RunSpec:
    return run.model_copy(update={"round": run.round.model_copy(update=changes)})


BLOCKTRAIN = Method(
    "blocktrain",
    "blocks with a loss of their own, each averaged over its replicas",
    run_of=lambda run: run,
)

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        BLOCKTRAIN,
        Method(
            "end-to-end",
            "plain causal transformer of the whole depth, trained by one worker",
            run_of=_end_to_end,
            alone=True,
        ),
        Method(
            "one-block",
            "plain causal transformer of one block's depth, trained by one worker",
            run_of=_one_block,
            alone=True,
        ),
        # Federated Averaging: McMahan et al. 2017, arXiv 1602.05629. Clients keep no state between rounds.
        Method(
            "fedavg",
            "full replicas, averaged after local_steps each; fresh moments in every round",
            run_of=_full_depth,
            keeps_moments=False,
        ),
        # Local SGD: Stich 2019, arXiv 1805.09767. Workers go on where they were, and meet often.
        Method(
            "local-sgd",
            "full replicas, averaged eight times as often as with fedavg; moments kept",
            run_of=_averaged_often,
        ),
        # DiLoCo: Douillard et al. 2023, arXiv 2311.08105. AdamW inside, Nesterov outside.
        Method(
            "diloco",
            "full replicas, local_steps of AdamW each, then a step of Nesterov with the mean update",
            run_of=_with_momentum,
        ),
    )
}
