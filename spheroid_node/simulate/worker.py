"""One simulated machine: a real trainer, real keys and real updates; only its speed is made up."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import ceil, exp

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spheroid_node.model.parameters import elements
from spheroid_node.model.randomness import stream
from spheroid_node.rounds.aggregator import Desk
from spheroid_node.rounds.collection import Base
from spheroid_node.rounds.contribution import Contributor, Submission
from spheroid_node.rounds.pacing import Pace
from spheroid_node.run import RunSpec, block_group
from spheroid_node.training.local import LocalTrainer, TrainOutcome
from spheroid_node.training.text import Text
from spheroid_node.wire.messages import Manifest
from spheroid_node.wire.signing import peer_id_of_key
from spheroid_node.wire.tensors import Vector, encoded_size

SPREAD = 0.4
"""Standard deviation of the logarithm of speeds: the fastest of ten machines is four times the slowest."""

SPARE = 1.5
"""The median machine trains a round's steps in this fraction of the time that the slot leaves."""

BYTES_PER_SECOND = 2.5e6
LATENCY = 0.05
"""Of the median machine's link, each way: 20 Mbit/s, 50 ms."""


@dataclass(frozen=True)
class Version:
    """A group's parameters; ``manifest`` is None for version 0."""

    vector: Vector
    base: Base
    manifest: Manifest | None = None


@dataclass(frozen=True)
class Machine:
    """How fast a machine computes and sends."""

    step_seconds: float
    bytes_per_second: float

    @classmethod
    def draw(cls, run: RunSpec, seed: int, index: int) -> Machine:
        slower, link = stream(seed, 1, index).normal(0.0, SPREAD, 2)
        median = (run.round.period - run.round.settle) / (SPARE * run.training.local_steps)
        return cls(median * exp(slower), BYTES_PER_SECOND * exp(link))

    def steps_between(self, begin: float, stop: float) -> int:
        """Steps that begin before ``stop``; the last one is finished."""
        return max(0, ceil((stop - begin) / self.step_seconds))

    def transfer_seconds(self, size: int) -> float:
        return LATENCY + size / self.bytes_per_second if size else 0.0


class Worker:
    """A machine with a replica of ``block``: what a node keeps between rounds."""

    def __init__(self, run: RunSpec, index: int, block: int, text: Text, seed: int) -> None:
        secret = hashlib.blake2b(f"simulated worker {seed} {index}".encode(), digest_size=32).digest()
        self.key = Ed25519PrivateKey.from_private_bytes(secret)
        self.peer = peer_id_of_key(self.key)
        self.block = block
        self.machine = Machine.draw(run, seed, index)
        self.trainer = LocalTrainer(run, block, text, "cpu", int(stream(seed, 2, index).integers(2**63)))
        self.groups = run.worker_groups(block)
        upstream = range(block) if run.learning.conditioning == "chain" else range(0)
        self._watched = (*self.groups, *map(block_group, upstream))
        self.contributors = {group: Contributor(run, group, elements(run, group)) for group in self.groups}
        self.pace = Pace()
        self.desk = Desk(run)
        self.held: dict[str, bytes] = {}
        """Digest of the version of each group that this machine has."""
        self._bases: dict[str, Base] = {}
        self._local_steps = run.training.local_steps

    def synchronise(self, versions: dict[str, Version]) -> int:
        """Take up the newest versions and settle what was sent; returns the bytes fetched for it."""
        fetched = 0
        for group in self._watched:
            version = versions[group]
            if self.held.get(group) != version.base.digest:
                # Version 0 follows from the seed: nobody sends it.
                fetched += encoded_size(len(version.vector), "float32") if version.manifest else 0
                self.held[group] = version.base.digest
            vector = version.vector
            if group in self.groups:
                self._bases[group] = version.base
                self.contributors[group].settle(version.manifest)
                vector = self.contributors[group].begin_from(vector)
            self.trainer.load(group, version.base.version, version.base.steps, vector)
        return fetched

    def train(self, begin: float, stop: float) -> TrainOutcome | None:
        """As many steps as this machine fits between two times; None if not one."""
        steps = min(self._local_steps, self.machine.steps_between(begin, stop))
        if not steps:
            return None
        self.pace.stepped(self.machine.step_seconds)
        return self.trainer.train(steps)

    def submission(self, group: str, round: int, outcome: TrainOutcome) -> Submission:
        """The update of a group, ready to be sealed and sent."""
        nonce = hashlib.blake2b(f"{self.peer} {group} {round}".encode(), digest_size=16).digest()
        update = self.trainer.update(group)
        return self.contributors[group].prepare(
            round, self._bases[group], update, outcome.steps, outcome.tokens, nonce
        )
