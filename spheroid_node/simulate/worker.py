"""One simulated machine: real keys, real rounds and real training; only its speed is made up."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from spheroid_node.rounds.aggregator import Desk
from spheroid_node.rounds.collection import Base
from spheroid_node.rounds.contribution import Contributor
from spheroid_node.rounds.ledger import Submission
from spheroid_node.rounds.pacing import Pace
from spheroid_node.rounds.slots import Slots
from spheroid_node.run import RunSpec
from spheroid_node.simulate.regime import Machine
from spheroid_node.training.local import TrainOutcome
from spheroid_node.wire.messages import Manifest, UpdateHeader
from spheroid_node.wire.signing import peer_id_of_key
from spheroid_node.wire.tensors import Vector, decode_vector


class Learner(Protocol):
    """What a worker asks of its trainer; :class:`LocalTrainer` is the real one."""

    def load(
        self,
        group: str,
        version: int,
        steps: int,
        vector: Vector,
        left_over: Vector | None = None,
        carry: bool = False,
    ) -> None: ...

    def reset_moments(self) -> None: ...

    def train(self, max_steps: int) -> TrainOutcome: ...

    def take(self, group: str) -> Vector: ...

    def is_at(self, group: str, version: int) -> bool: ...

    def screen(self, group: str, update: Vector, windows: Tensor) -> float | None: ...


@dataclass(frozen=True)
class Version:
    """A group's parameters and what travels with them; ``manifest`` is None for version 0."""

    vector: Vector
    payload: Vector
    """See rounds/outer.py."""
    base: Base
    manifest: Manifest | None = None


class Worker:
    """A machine with a replica of ``block``: what a node keeps between rounds."""

    def __init__(
        self,
        run: RunSpec,
        index: int,
        block: int,
        machine: Machine,
        learner: Learner,
        lengths: Mapping[str, int],
        seed: int,
    ) -> None:
        secret = hashlib.blake2b(f"simulated worker {seed} {index}".encode(), digest_size=32).digest()
        self.key = Ed25519PrivateKey.from_private_bytes(secret)
        self.peer = peer_id_of_key(self.key)
        self.index, self.block, self.machine, self.learner = index, block, machine, learner
        self.groups = run.worker_groups(block)
        self.copied = run.copied_groups(block)
        self.watched = (*self.groups, *self.copied)
        """Own groups, and those that training reads."""
        self.contributors = {group: Contributor(run, group, lengths[group]) for group in self.groups}
        self.pace = Pace()
        self.desk = Desk(run)
        self.held: dict[str, bytes] = {}
        """Digest of the version of each group that this machine has."""
        self.idle_since = 0.0
        """When it last stopped training."""
        self.ahead: TrainOutcome | None = None
        """What it trained while its last update was on its way."""
        self._bases: dict[str, Base] = {}
        self._run = run

    def outdated(self, version_of: Callable[[str, int], Version]) -> list[str]:
        """Groups of which there is a version that this machine has to fetch.

        ``version_of`` gives the version of a group so many before its newest. Version 0 follows from the
        seed: nobody sends it.
        """
        newest = {group: version_of(group, 0) for group in self.watched}
        return [
            g for g, version in newest.items() if version.manifest and self.held.get(g) != version.base.digest
        ]

    def synchronise(self, version_of: Callable[[str, int], Version], carry: bool) -> None:
        """Take up the newest versions and settle what was sent; ``carry`` on what was learnt since then."""
        for group in self.watched:
            version, left_over = version_of(group, 0), None
            self.held[group] = version.base.digest
            if group in self.groups:
                self._bases[group] = version.base
                newest = version.manifest
                self.contributors[group].settle({newest.version: newest} if newest else {})
                left_over = self.contributors[group].left_over
            else:
                version = version_of(group, self.copied[group])
            base = version.base
            self.learner.load(group, base.version, base.steps, version.vector, left_over, carry)

    def steps(self, slots: Slots, round: int, begin: float, most: int) -> int:
        """Steps, up to ``most``, that this machine makes from ``begin`` on; 0: it sits the round out.

        A node that could not keep up even with an empty slot makes one step, or it would never measure
        itself anew.
        """
        stop = self.pace.stop_at(slots, round)
        if stop > begin:
            return min(most, self.machine.steps_between(begin, stop))
        return 0 if self.pace.can_keep_up(slots) else 1

    def steps_ahead(self, slots: Slots, until: float) -> int:
        """Steps that it makes from the end of its last update ``until`` it has the new versions."""
        most = self.pace.ahead(slots, self._run.training.local_steps)
        return min(most, self.machine.steps_between(self.idle_since, until))

    def train(self, steps: int) -> TrainOutcome:
        self.pace.stepped(self.machine.step_seconds)
        return self.learner.train(steps)

    def screened(self, header: UpdateHeader, payload: bytes, scale: float, windows: Tensor) -> float | None:
        """What an update adds to the cross-entropy; None where this machine has not got its base."""
        if not self.learner.is_at(header.group, header.base):
            return None
        update = np.float32(scale) * decode_vector(payload, header.dtype)
        return self.learner.screen(header.group, update, windows)

    def submission(self, group: str, round: int, outcome: TrainOutcome) -> Submission:
        """The update of a group, ready to be sealed and sent."""
        nonce = hashlib.blake2b(f"{self.peer} {group} {round}".encode(), digest_size=16).digest()
        update = self.learner.take(group)
        return self.contributors[group].prepare(
            round, self._bases[group], update, outcome.steps, outcome.tokens, nonce
        )
