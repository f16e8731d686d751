"""RunSpec: all that a swarm must agree on, and the run id that names it.

Two nodes with different run ids never exchange parameters, so whatever changes the outcome of training
or the meaning of a message belongs here, and whatever one machine may decide alone belongs in config.py.
"""

from __future__ import annotations

import hashlib
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spheroid_node.errors import NoSuchBlock, RunFileInvalid

VOCABULARY = 256
"""Bytes. There is no tokeniser to agree on."""

INTERFACE_GROUP = "interface"

SHARD_PATIENCE = 3
"""Rounds that the other shards wait, as it were, for one that has gained no version."""

MAX_RUN_BYTES = 16_384
"""A packed RunSpec is one DHT record, and DHT records stay small."""

PositiveInt = Annotated[int, Field(gt=0, lt=2**63)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**63)]
"""What msgpack has room for."""
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSpec(_Section):
    """Shape of the composed model: ``blocks`` blocks of ``layers`` causal layers."""

    blocks: Annotated[int, Field(gt=0, le=1024)]
    layers: Annotated[int, Field(gt=0, le=256)]
    width: Annotated[int, Field(gt=0, le=32_768)]
    heads: PositiveInt
    window: Annotated[int, Field(gt=1, le=65_536)]
    """Positions a layer attends to, and bytes in a training window."""
    mlp_ratio: PositiveInt = 4
    mixer: Literal["attention", "mlp"] = "attention"
    """What a layer looks back with: attention (a transformer), or a causal MLP over positions."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ModelSpec:
        if self.width % self.heads:
            raise ValueError(f"heads ({self.heads}) must divide width ({self.width})")
        if (self.width // self.heads) % 2:
            raise ValueError(
                f"width / heads ({self.width // self.heads}) must be even, for rotary position embeddings"
            )
        return self


class NoiseSpec(_Section):
    """Log-normal density of σ truncated to [sigma_min, sigma_max], cut into intervals of equal mass."""

    sigma_min: PositiveFloat = 1.0
    sigma_max: PositiveFloat = 10.0
    p_mean: Annotated[float, Field(allow_inf_nan=False)] = 1.1513
    """Mean of ln σ. The default is the middle of [1, 10] on the log scale."""
    p_std: PositiveFloat = 1.2
    overlap: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of its log-range by which an interval reaches into its neighbours, in training only."""

    @model_validator(mode="after")
    def _ordered(self) -> NoiseSpec:
        if self.sigma_min >= self.sigma_max:
            raise ValueError(f"sigma_min ({self.sigma_min}) must be below sigma_max ({self.sigma_max})")
        return self


class LearningSpec(_Section):
    """What a block predicts, from what, and which prediction is read out (design.md, section 5)."""

    denoiser: Literal["evidence", "edm", "plain"] = "evidence"
    """``plain`` has no noise at all: the next-byte loss of an ordinary language model, for comparison."""
    conditioning: Literal["chain", "context"] = "chain"
    readout: Literal["last", "mean"] = "last"
    lookahead: NonNegativeFloat = 0.0
    """``chain``: weight of the next block's loss in a block's own, taken through a frozen copy of that block.
    Its gradient stays on the machine. 0 is none; with ``context`` there is none either."""
    staggered: bool = True
    """``chain``: a block is put together with that version of the block before it that it was trained on, one
    version further back for every block. False: all blocks at their newest."""


class TrainingSpec(_Section):
    """Local training between two versions. Learning-rate steps count the group's steps, not a worker's."""

    local_steps: PositiveInt = 1000
    """Most steps a worker may train in a round."""
    batch: PositiveInt = 16
    learning_rate: PositiveFloat = 2e-3
    warmup_steps: NonNegativeInt = 50
    decay_steps: NonNegativeInt = 0
    """Cosine decay to a tenth of the rate over this many steps; 0 keeps it constant."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    weight_decay: NonNegativeFloat = 0.1
    """On matrices inside blocks; never on embeddings, head, norms and biases."""
    clip_norm: PositiveFloat = 1.0
    mask_suffix: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the windows of which the blocks read only the beginning: from a random position on, MASK
    stands for the bytes. ``one-sweep`` decoding needs a model trained so. Targets stay the bytes."""
    outer: Literal["average", "nesterov"] = "average"
    """How the mean update becomes a version: it is added to the version before, or it is the gradient of a
    step of SGD with Nesterov momentum (DiLoCo)."""
    outer_rate: PositiveFloat = 0.7
    """``nesterov``: learning rate of that step."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9


class RoundSpec(_Section):
    """Slots of DHT time: round r lasts from genesis + r·period; τ is ``settle`` seconds before its end."""

    genesis: NonNegativeFloat = 1_767_225_600.0
    """Start of round 0, seconds of DHT time since 1970. The default is 2026-01-01."""
    period: PositiveFloat = 60.0
    settle: PositiveFloat = 8.0
    aggregation: Literal["mean", "clipped", "trimmed-mean", "median"] = "clipped"
    clip_factor: PositiveFloat = 3.0
    """``clipped``: an update longer than this multiple of the median norm is scaled down to it."""
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """``trimmed-mean``: share of the values of each element that is left out at either end."""
    max_update_norm: PositiveFloat = 1e4
    compression: Literal["fp16", "int8", "float32"] = "fp16"
    screen: NonNegativeFloat = 0.0
    """An update is refused if it makes the group's from-noise cross-entropy on held-out text worse by more
    than this, nats a byte. 0: no update is tried out."""
    screen_windows: Annotated[int, Field(gt=0, le=4096)] = 16
    """Held-out windows that an update is tried on."""
    shards: Annotated[int, Field(gt=0, le=256)] = 1
    """Parts that the parameters of a group are cut into; each gains versions by itself."""
    shard_above: PositiveInt = 50
    """Live replicas of a group up to which one peer aggregates all its shards; above, each elects its own."""

    @model_validator(mode="after")
    def _settles_within_period(self) -> RoundSpec:
        if self.settle >= self.period:
            raise ValueError(f"settle ({self.settle}) must be shorter than period ({self.period})")
        return self


class DataSpec(_Section):
    """The training text. Without a hash each volunteer brings what text they like."""

    name: Annotated[str, Field(min_length=1, max_length=128)] = "python-docs"
    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""


class RunSpec(_Section):
    """Everything a swarm agrees on. Frozen, and named by :attr:`run_id`."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w .-]+$")]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    model: ModelSpec
    noise: NoiseSpec = NoiseSpec()
    learning: LearningSpec = LearningSpec()
    training: TrainingSpec = TrainingSpec()
    round: RoundSpec = RoundSpec()
    interface: Literal["shared", "frozen"] = "shared"
    states: Literal["fp16", "int8"] = "fp16"
    """What a text's states are rounded to between the hops of a chain."""
    data: DataSpec = DataSpec()
    access: Literal["open"] | tuple[Annotated[str, Field(min_length=40, max_length=64)], ...] = "open"
    """``open``, or the peer ids that may own blocks of this run."""
    protocol: tuple[PositiveInt, PositiveInt] = (1, 1)
    """Oldest and newest protocol version a node of this run may speak."""

    @model_validator(mode="after")
    def _protocol_ordered(self) -> RunSpec:
        if self.protocol[0] > self.protocol[1]:
            raise ValueError(f"protocol: the oldest ({self.protocol[0]}) is above the newest")
        return self

    @cached_property
    def run_id(self) -> str:
        """First 16 hex digits of the BLAKE2b hash of the packed run."""
        return hashlib.blake2b(self.pack()).hexdigest()[:16]

    def model_copy(self, **changes: Any) -> Self:
        """As in pydantic; a copy is a run of its own, and its id is worked out anew."""
        copy = super().model_copy(**changes)
        copy.__dict__.pop("run_id", None)
        return copy

    @property
    def wholes(self) -> tuple[str, ...]:
        """What gains versions: the blocks, then the interface if it is trained."""
        blocks = tuple(block_group(block) for block in range(self.model.blocks))
        return blocks if self.interface == "frozen" else (*blocks, INTERFACE_GROUP)

    def shards_of(self, whole: str) -> tuple[str, ...]:
        """The groups that the parameters of a block or of the interface are cut into, in their order.

        An interface that is frozen has no rounds, and is not cut.
        """
        if self.round.shards == 1 or (whole == INTERFACE_GROUP and self.interface == "frozen"):
            return (whole,)
        return tuple(f"{whole}.{number}" for number in range(self.round.shards))

    @property
    def groups(self) -> tuple[str, ...]:
        """All groups of parameters that have rounds of their own: :attr:`wholes`, or the shards of each."""
        return tuple(group for whole in self.wholes for group in self.shards_of(whole))

    def worker_wholes(self, block: int) -> tuple[str, ...]:
        """What a worker of ``block`` trains."""
        wholes = (block_group(block), INTERFACE_GROUP)
        return wholes if self.interface == "shared" else wholes[:1]

    def worker_groups(self, block: int) -> tuple[str, ...]:
        """The groups that a worker of ``block`` trains."""
        return tuple(group for whole in self.worker_wholes(block) for group in self.shards_of(whole))

    def upstream_blocks(self, block: int) -> tuple[int, ...]:
        """The blocks whose hidden state a worker of ``block`` computes on frozen copies."""
        return tuple(range(block)) if self.learning.conditioning == "chain" else ()

    @property
    def lags(self) -> dict[str, int]:
        """By block and interface: versions by which that part of the composed model is behind its newest."""
        return {
            **dict.fromkeys(self.wholes, 0),
            **{block_group(block): self.lag(block) for block in range(self.model.blocks)},
        }

    def lag(self, block: int, below: int | None = None) -> int:
        """Versions that ``block`` is behind its newest, with ``below`` (or the last block) at its own.

        A worker of ``below`` trains its next version on what is behind by one less.
        """
        if not self.learning.staggered or self.learning.conditioning != "chain":
            return 0
        return max(0, (self.model.blocks - 1 if below is None else below) - block)

    def copy_lag(self, own: int, other: int) -> int:
        """Versions by which the frozen copy of ``other`` is behind its newest while ``own`` is trained."""
        return max(0, self.lag(other, own) - 1)

    @property
    def kept_versions(self) -> int:
        """Versions of a group that a node must keep: those in use, and one more for what is under way.

        A shard that fell behind is served beside older versions of the others (rounds/shards.py).
        """
        return 2 + self.lag(0) + (SHARD_PATIENCE if self.round.shards > 1 else 0)

    def ahead_block(self, block: int) -> int | None:
        """The block through a frozen copy of which a worker of ``block`` looks ahead, if it does."""
        looks = self.learning.conditioning == "chain" and self.learning.lookahead > 0
        return block + 1 if looks and block + 1 < self.model.blocks else None

    def copied_blocks(self, block: int) -> tuple[int, ...]:
        """The blocks that a worker of ``block`` has copies of."""
        ahead = self.ahead_block(block)
        return self.upstream_blocks(block) if ahead is None else (*self.upstream_blocks(block), ahead)

    def copied_groups(self, block: int) -> dict[str, int]:
        """The groups that a worker of ``block`` follows without training them, and how far each copy lags."""
        return {
            group: self.copy_lag(block, index)
            for index in self.copied_blocks(block)
            for group in self.shards_of(block_group(index))
        }

    def allows(self, peer: str) -> bool:
        return self.access == "open" or peer in self.access

    def check_block(self, block: int) -> None:
        """Raise :class:`NoSuchBlock` unless ``block`` is an index of this run."""
        if not 0 <= block < self.model.blocks:
            raise NoSuchBlock(block, self.model.blocks)

    def pack(self) -> bytes:
        """Canonical msgpack: maps sorted by key, every field present."""
        return bytes(msgpack.packb(_sorted(self.model_dump(mode="json"))))

    @classmethod
    def unpack(cls, packed: bytes) -> RunSpec:
        """Raise :class:`ValueError` for anything that is not a packed run."""
        if len(packed) > MAX_RUN_BYTES:
            raise ValueError(f"a packed run has at most {MAX_RUN_BYTES} bytes, not {len(packed)}")
        try:
            fields = msgpack.unpackb(packed, strict_map_key=True, max_array_len=1024, max_map_len=64)
        except Exception as error:
            raise ValueError(f"not msgpack: {error}") from error
        return cls.model_validate(fields)

    @classmethod
    def from_toml(cls, path: Path) -> RunSpec:
        """Read a run file. Raises :class:`RunFileInvalid` and says which key is wrong."""
        try:
            run = cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise RunFileInvalid(str(path), error.strerror or str(error)) from error
        except ValidationError as error:
            raise RunFileInvalid(str(path), describe(error)) from error
        except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, or nested without end
            raise RunFileInvalid(str(path), str(error)) from error
        if len(run.pack()) > MAX_RUN_BYTES:
            raise RunFileInvalid(
                str(path), f"access: too many peers: the packed run has at most {MAX_RUN_BYTES} bytes"
            )
        return run


def block_group(block: int) -> str:
    """Name of the group that holds the parameters of ``block``; with shards, of all of them together."""
    return f"block-{block}"


def whole_of(group: str) -> str:
    """The block or the interface that ``group`` is, or is a shard of."""
    return group.partition(".")[0]


def describe(error: ValidationError) -> str:
    """All complaints of a pydantic error in one line, each with the key it is about."""
    return "; ".join(
        f"{'.'.join(str(part) for part in complaint['loc']) or 'file'}: "
        f"{complaint['msg'].removeprefix('Value error, ')}"
        for complaint in error.errors()
    )


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value
