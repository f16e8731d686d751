"""The swarm: workers, the links between them, and the versions that their rounds make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import fsum

from spheroid_node.model.composed import ComposedModel
from spheroid_node.model.initial import initial_vector
from spheroid_node.model.parameters import elements, group_module, unflatten_
from spheroid_node.model.randomness import stream
from spheroid_node.rounds.aggregator import Aggregator, NewVersion, Offer
from spheroid_node.rounds.collection import Answer, Base
from spheroid_node.rounds.contribution import Submission
from spheroid_node.rounds.election import ranking
from spheroid_node.rounds.forks import choose, is_plausible
from spheroid_node.rounds.slots import Slots
from spheroid_node.run import INTERFACE_GROUP, ModelSpec, RoundSpec, RunSpec, TrainingSpec
from spheroid_node.simulate.clock import Clock
from spheroid_node.simulate.worker import Version, Worker
from spheroid_node.training.evaluation import from_noise
from spheroid_node.training.local import TrainOutcome
from spheroid_node.training.text import Text, held_out_windows
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.messages import Manifest
from spheroid_node.wire.tensors import chunks, digest_of_hashes

EVALUATION_WINDOWS = 32


def small_run() -> RunSpec:
    """What is simulated when no run file is given: minutes of a swarm in seconds of one machine."""
    return RunSpec(
        name="small",
        model=ModelSpec(blocks=3, layers=1, width=64, heads=4, window=64),
        training=TrainingSpec(local_steps=40, batch=8, warmup_steps=20),
        round=RoundSpec(period=10.0, settle=2.0),
    )


@dataclass(frozen=True)
class RoundReport:
    """One slot: what became of the updates, and how good the model was at its end."""

    round: int
    seconds: float
    """Virtual time since the first round began."""
    expected: int
    accepted: int
    late: int
    refused: int
    steps: float
    """Mean local steps of the workers that trained."""
    loss: float | None
    """Mean over them; None if nobody trained."""
    ce: list[float]
    """From noise, nats a byte, after each block."""
    bytes_moved: int
    """Since the first round began."""

    @property
    def participation(self) -> float:
        return self.accepted / self.expected


class Swarm:
    """``workers`` machines, dealt out to the blocks in turn; a function of its arguments alone.

    In every round the share ``slow`` of them, drawn anew each time, has a link that stalls beyond τ.
    """

    def __init__(self, run: RunSpec, text: Text, workers: int, seed: int = 0, slow: float = 0.0) -> None:
        if workers < run.model.blocks:
            raise ValueError(f"{run.model.blocks} blocks need as many workers at least, not {workers}")
        self.run, self._seed, self._slow = run, seed, slow
        self.slots = Slots.of(run.round)
        self.workers = [Worker(run, index, index % run.model.blocks, text, seed) for index in range(workers)]
        self._by_peer = {worker.peer: worker for worker in self.workers}
        self.versions = {
            group: Version(vector, Base.initial(vector))
            for group in run.groups
            for vector in [initial_vector(run, group)]
        }
        self.chosen: dict[str, tuple[str, Manifest]] = {}
        self._windows = held_out_windows(text.held_out, EVALUATION_WINDOWS, run.model.window)
        self._clock = Clock(self.slots.start(0))
        self._moved = 0
        self._stalled: dict[str, float] = {}
        self._verdicts: Counter[Verdict] = Counter()
        self._outcomes: list[TrainOutcome] = []
        for worker in self.workers:
            self._clock.at(self.slots.start(0), partial(self._begin, worker))

    def play(self, rounds: int) -> Iterator[RoundReport]:
        """Slot after slot, from the first."""
        for round in range(rounds):
            self._open(round)
            self._clock.run_until(self.slots.end(round))
            yield self._report(round)

    def model(self) -> ComposedModel:
        """The newest version of every group, put together."""
        model = ComposedModel(self.run)
        unflatten_(model.interface, initial_vector(self.run, INTERFACE_GROUP))
        for group, version in self.versions.items():
            unflatten_(group_module(model, group), version.vector)
        return model.eval()

    def digest(self) -> str:
        """Names the parameters of all groups: equal digests, equal models."""
        return digest_of_hashes(self.versions[group].base.digest for group in self.run.groups).hex()

    # --- a slot -----------------------------------------------------------------------------------

    def _open(self, round: int) -> None:
        self._verdicts.clear()
        self._outcomes.clear()
        for group in self.run.groups:
            peers, base = self._peers(group), self.versions[group].base
            leader = self._leader(group, round)
            size = elements(self.run, group)
            leader.desk.open(Aggregator(self.run, group, round, base, size, peers))
            self._clock.at(self.slots.deadline(round), partial(self._close_if_over, leader, group, round))
        draws = stream(self._seed, 3, round)
        order = draws.permutation(len(self.workers))
        delays = draws.uniform(0.0, self.run.round.settle, len(self.workers))
        self._stalled = {
            self.workers[index].peer: self.slots.deadline(round) + delays[index]
            for index in order[: round_half_up(self._slow * len(self.workers))]
        }

    def _begin(self, worker: Worker) -> None:
        """A worker that is free takes part in the round whose slot it is."""
        round = self.slots.round_at(self._clock.now)
        fetched = worker.synchronise(self.versions)
        self._moved += fetched
        ready = self._clock.now + worker.machine.transfer_seconds(fetched)
        outcome = worker.train(ready, worker.pace.stop_at(self.slots, round))
        if outcome is None:
            worker.pace.skipped()
            self._clock.at(self.slots.start(round + 1), partial(self._begin, worker))
            return
        self._outcomes.append(outcome)
        trained = ready + outcome.steps * worker.machine.step_seconds
        self._clock.at(trained, partial(self._submit, worker, round, outcome))

    def _submit(self, worker: Worker, round: int, outcome: TrainOutcome) -> None:
        """Send one update after the other; headers go ahead of their payloads."""
        begun = sent = self._clock.now
        stalled = self._stalled.get(worker.peer)
        for group in worker.groups:
            leader, submission = self._leader(group, round), worker.submission(group, round, outcome)
            header_at = sent
            if leader is not worker:
                self._moved += len(submission.payload)
                sent += worker.machine.transfer_seconds(len(submission.payload))
            sent = sent if stalled is None else max(sent, stalled)
            self._clock.at(header_at, partial(self._offer, worker, leader, submission, sent))
        if stalled is None:
            # A stall says nothing about the link, so it does not count as a measurement.
            worker.pace.uploaded(sent - begun)
        free = max(sent, self.slots.start(round + 1))
        self._clock.at(free, partial(self._begin, worker))

    def _offer(self, worker: Worker, leader: Worker, submission: Submission, arrival: float) -> None:
        offer = leader.desk.offer(submission.header.seal(worker.key), self._clock.now)
        if offer.answer is None:
            self._clock.at(arrival, partial(self._deliver, worker, leader, offer, submission.payload))
        else:
            self._answer(worker, offer, offer.answer)

    def _deliver(self, worker: Worker, leader: Worker, offer: Offer, payload: bytes) -> None:
        meter = offer.meter()
        for chunk in chunks(payload):
            meter.feed(chunk)
        answer = leader.desk.deliver(offer, meter.facts(), chunks(payload), self._clock.now)
        self._answer(worker, offer, answer)
        self._close_if_over(leader, offer.header.group, offer.header.round)

    def _answer(self, worker: Worker, offer: Offer, answer: Answer) -> None:
        self._verdicts[answer.verdict] += 1
        worker.contributors[offer.header.group].answered(offer.receipt(answer))

    def _close_if_over(self, leader: Worker, group: str, round: int) -> None:
        aggregator = leader.desk.aggregator(group)
        if aggregator is None or aggregator.collection.round != round or aggregator.collection.is_closed:
            return
        if aggregator.collection.is_over(self._clock.now):
            made = aggregator.close(self.versions[group].vector, rank=0)
            if made is not None:
                self._announce(leader, made)

    def _announce(self, leader: Worker, made: NewVersion) -> None:
        signer, manifest = Manifest.unseal(made.manifest.seal(leader.key))
        group, now = manifest.group, self._clock.now
        if not is_plausible(manifest, self.run, len(made.vector), now):
            raise AssertionError(f"a version of {group} that no node would follow: {manifest}")
        known = [self.chosen[group]] if group in self.chosen else []
        best = choose([*known, (signer, manifest)])
        if best == (signer, manifest):
            self.chosen[group] = best
            self.versions[group] = Version(made.vector, Base.of(manifest), manifest)
            leader.held[group] = manifest.digest

    # --- who and how well -------------------------------------------------------------------------

    def _peers(self, group: str) -> list[str]:
        return [worker.peer for worker in self.workers if group in worker.groups]

    def _leader(self, group: str, round: int) -> Worker:
        return self._by_peer[ranking(self.run.run_id, group, round, self._peers(group))[0]]

    def _report(self, round: int) -> RoundReport:
        trained = len(self._outcomes)
        return RoundReport(
            round=round,
            seconds=self._clock.now - self.slots.start(0),
            expected=sum(len(worker.groups) for worker in self.workers),
            accepted=self._verdicts[Verdict.ACCEPTED],
            late=self._verdicts[Verdict.LATE],
            refused=self._verdicts[Verdict.REFUSED],
            steps=sum(outcome.steps for outcome in self._outcomes) / trained if trained else 0.0,
            loss=fsum(outcome.loss for outcome in self._outcomes) / trained if trained else None,
            ce=from_noise(self.model(), self._windows).ce,
            bytes_moved=self._moved,
        )


def round_half_up(value: float) -> int:
    return int(value + 0.5)
