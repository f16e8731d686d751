"""The swarm: workers, the links between them, and the versions that their rounds make."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from math import fsum

from spheroid_node.model.composed import ComposedModel
from spheroid_node.model.initial import initial_vector
from spheroid_node.model.parameters import elements, group_module, join, unflatten_
from spheroid_node.model.randomness import stream
from spheroid_node.rounds.aggregation import PayloadFacts
from spheroid_node.rounds.aggregator import Aggregator, NewVersion, Offer
from spheroid_node.rounds.collection import Answer, Base
from spheroid_node.rounds.election import candidates
from spheroid_node.rounds.forks import choose, is_plausible
from spheroid_node.rounds.outer import first_payload, payload_elements
from spheroid_node.rounds.slots import Slots
from spheroid_node.run import INTERFACE_GROUP, ModelSpec, RoundSpec, RunSpec, TrainingSpec
from spheroid_node.simulate import dry
from spheroid_node.simulate.clock import Clock
from spheroid_node.simulate.hostile import forged
from spheroid_node.simulate.methods import BLOCKTRAIN, Method
from spheroid_node.simulate.regime import LOCKSTEP, Regime
from spheroid_node.simulate.worker import Learner, Version, Worker
from spheroid_node.training.evaluation import Evaluation, from_noise
from spheroid_node.training.local import LocalTrainer, NonFiniteLoss, TrainOutcome
from spheroid_node.training.text import Text, held_out_windows
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.messages import Manifest
from spheroid_node.wire.tensors import chunks, digest_of_hashes, encoded_size, vector_digest

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
    away: int
    """Machines that were not there."""
    steps: float
    """Mean local steps of the workers that trained."""
    loss: float | None
    """Mean over them; None if nobody trained, or the swarm is dry."""
    ce: list[float]
    """From noise, nats a byte, after each block; empty if it was not measured."""
    ce_readout: float | None
    """Of what the run reads out."""
    tokens: float
    """Trained since the first round began, by all workers of a block: mean over blocks."""
    bytes_moved: int
    """Since the first round began."""
    busiest_bytes: int
    """Sent and received in this slot by the machine that moved most."""

    @property
    def participation(self) -> float:
        return self.accepted / self.expected


class Swarm:
    """``workers`` machines, dealt out to the blocks in turn; a function of its arguments alone.

    ``run`` is the method's own: what its ``run_of`` gave. ``seed`` is of everything: machines, keys, mishaps,
    draws of text and, in place of the run's seed, version 0. Without ``text`` the swarm is dry
    (simulate/dry.py). ``precision`` and ``compiled`` are the trainers'. ``attacks`` says what some workers,
    by number, do (simulate/hostile.py). With ``overlap`` training goes on while updates and versions travel.
    Raises :class:`ValueError` if a block would be left without a worker.
    """

    def __init__(
        self,
        run: RunSpec,
        text: Text | None,
        workers: int,
        seed: int = 0,
        regime: Regime = LOCKSTEP,
        method: Method = BLOCKTRAIN,
        evaluation_windows: int = EVALUATION_WINDOWS,
        precision: str = "float32",
        compiled: bool = False,
        attacks: Mapping[int, str] | None = None,
        overlap: bool = False,
    ) -> None:
        if workers < run.model.blocks:
            raise ValueError(f"{run.model.blocks} blocks need as many workers at least, not {workers}")
        run = regime.run_of(run.model_copy(update={"seed": seed}))
        self.run, self.text, self.regime, self.method, self._seed = run, text, regime, method, seed
        self._speed = precision, compiled
        self._attacks = attacks or {}
        self._overlap = overlap
        self.slots = Slots.of(run.round)
        self.versions = {group: self._initial(group) for group in run.groups}
        self._past = {
            group: deque([version], maxlen=run.kept_versions) for group, version in self.versions.items()
        }
        self._elements = {group: elements(run, group) for group in run.groups}
        """Of what crosses a link; the vectors of a dry swarm are shorter."""
        self.workers = [self._worker(index, index % run.model.blocks) for index in range(workers)]
        self._by_peer = {worker.peer: worker for worker in self.workers}
        self._peers = {
            group: [worker.peer for worker in self.workers if group in worker.groups] for group in run.groups
        }
        self.chosen: dict[str, tuple[str, Manifest]] = {}
        self.tokens = [0] * run.model.blocks
        """Trained so far, by all workers of each block."""
        self.bytes_by_worker = [0] * workers
        """Sent and received so far, by each worker."""
        self._moved_before = self.bytes_by_worker.copy()
        self._windows = (
            held_out_windows(text.held_out, evaluation_windows, run.model.window) if text else None
        )
        self._screen = (
            held_out_windows(text.held_out, run.round.screen_windows, run.model.window) if text else None
        )
        self._round = 0
        self._clock = Clock(self.slots.start(0))
        self._moved = 0
        self._mishaps = regime.mishaps(run, seed, 0, workers)
        self._leaders: dict[tuple[str, int], tuple[int, Worker]] = {}
        self._verdicts: Counter[Verdict] = Counter()
        self._outcomes: list[TrainOutcome] = []
        for worker in self.workers:
            self._clock.at(self.slots.start(0), partial(self._begin, worker))

    def play(self, rounds: int, evaluate_every: int = 1) -> Iterator[RoundReport]:
        """Slot after slot, going on where the last ended; measured after every so many, and at the end."""
        end = self._round + rounds
        while self._round < end:
            round, self._round = self._round, self._round + 1
            self._moved_before = self.bytes_by_worker.copy()
            self._open(round)
            self._clock.run_until(self.slots.end(round))
            wanted = self._round % evaluate_every == 0 or self._round == end
            yield self._report(round, self.evaluate() if wanted else None)

    def together(self) -> dict[str, Version]:
        """By block and interface, what belongs together: the newest version, or one as far behind as
        staggering has it. Shards are put together as they are."""
        return {whole: self._whole(whole, lag) for whole, lag in self.run.lags.items()}

    def _whole(self, whole: str, lag: int) -> Version:
        versions = [self.version(group, lag) for group in self.run.shards_of(whole)]
        oldest = min(versions, key=lambda version: version.base.version)
        parameters = join([version.vector for version in versions])
        return oldest if len(versions) == 1 else replace(oldest, vector=parameters)

    def model(self) -> ComposedModel:
        """What the versions of :meth:`together` make."""
        model = ComposedModel(self.run)
        unflatten_(model.interface, initial_vector(self.run, INTERFACE_GROUP))
        for group, version in self.together().items():
            unflatten_(group_module(model, group), version.vector)
        return model.eval()

    def version(self, group: str, lag: int = 0) -> Version:
        """The version so many before the newest; the oldest there is where that is too far back."""
        past = self._past[group]
        return past[max(0, len(past) - 1 - lag)]

    def evaluate(self) -> Evaluation | None:
        """The newest versions on held-out text, from noise; None for a dry swarm."""
        return None if self._windows is None else from_noise(self.model(), self._windows)

    def digest(self) -> str:
        """Names the newest parameters of all blocks and of the interface: equal digests, equal models."""
        return digest_of_hashes(
            vector_digest(self._whole(whole, 0).vector) for whole in self.run.wholes
        ).hex()

    # --- a slot -----------------------------------------------------------------------------------

    def _open(self, round: int) -> None:
        self._verdicts.clear()
        self._outcomes.clear()
        self._mishaps = self.regime.mishaps(self.run, self._seed, round, len(self.workers))
        for group in self.run.groups:
            ranked = enumerate(candidates(self.run, group, round, self._peers[group]))
            places = ((rank, self._by_peer[peer]) for rank, peer in ranked)
            # Whoever does not answer is skipped for the next.
            found = next((place for place in places if not self._mishaps.away[place[1].index]), None)
            if found:
                self._leaders[group, round] = found
                base, size = self.versions[group].base, len(self.versions[group].vector)
                found[1].desk.open(
                    Aggregator(self.run, group, round, base, size, self._peers[group], BytesIO)
                )
                self._clock.at(self.slots.deadline(round), partial(self._close, group, round))

    def _begin(self, worker: Worker) -> None:
        """A worker that is free takes part in the round whose slot it is."""
        round = self.slots.round_at(self._clock.now)
        sit_out = partial(self._clock.at, self.slots.start(round + 1), partial(self._begin, worker))
        if self._mishaps.away[worker.index]:
            worker.idle_since = self.slots.start(round + 1)
            sit_out()
            return
        ready = self._clock.now + worker.machine.transfer_seconds(self._fetch(worker))
        if self._overlap and worker.ahead is None and (ahead := worker.steps_ahead(self.slots, ready)):
            worker.ahead = self._train(worker, ahead)
            # A step that has begun is finished before the new versions are loaded.
            ready = max(ready, worker.idle_since + ahead * worker.machine.step_seconds)
        worker.synchronise(self.version, self._overlap)
        left = self.run.training.local_steps - (worker.ahead.steps if worker.ahead else 0)
        steps = worker.steps(self.slots, round, ready, left)
        outcome = self._train(worker, steps) if steps else None
        worker.idle_since = ready + (outcome.steps if outcome else 0) * worker.machine.step_seconds
        if worker.ahead is not None and (outcome or not left):
            outcome, worker.ahead = worker.ahead.then(outcome) if outcome else worker.ahead, None
        if outcome is None:
            worker.pace.skipped()
            sit_out()
            return
        self._outcomes.append(outcome)
        self._clock.at(worker.idle_since, partial(self._submit, worker, round, outcome))

    def _fetch(self, worker: Worker) -> int:
        """Send a worker what it has not got; returns the bytes it took. Who made a version sends it."""
        total = 0
        for group in worker.outdated(self.version):
            size = encoded_size(payload_elements(self.run.training, self._elements[group]), "float32")
            self._move(size, self._by_peer[self.chosen[group][0]], worker)
            total += size
        return total

    def _train(self, worker: Worker, steps: int) -> TrainOutcome | None:
        """None if the loss was not finite from the first step on: then there is nothing to hand in."""
        if not self.method.keeps_moments:
            worker.learner.reset_moments()
        try:
            outcome = worker.train(steps)
        except NonFiniteLoss:
            return None
        self.tokens[worker.block] += outcome.tokens
        return outcome

    def _submit(self, worker: Worker, round: int, outcome: TrainOutcome) -> None:
        now, stall = self._clock.now, float(self._mishaps.stall_seconds[worker.index])
        # A node gives up on a link that stands still, and does not count that as a measurement.
        measured_from = None if stall else now
        self._clock.at(now + stall, partial(self._send, worker, round, outcome, worker.groups, measured_from))

    def _send(
        self,
        worker: Worker,
        round: int,
        outcome: TrainOutcome,
        groups: tuple[str, ...],
        measured_from: float | None,
    ) -> None:
        """One update after the other: its header, and its payload if that is wanted."""
        now = self._clock.now
        if not groups:
            if measured_from is not None:
                worker.pace.uploaded(now - measured_from)
            self._clock.at(self.slots.start(round + 1), partial(self._begin, worker))
            return
        group, sent = groups[0], now
        _, leader = self._leaders[group, round]
        submission = worker.submission(group, round, outcome)
        if worker.index in self._attacks:
            submission = forged(submission, self._attacks[worker.index], self._seed, worker.index)
        offer = leader.desk.offer(submission.header.seal(worker.key), now)
        if offer.answer is None:
            if leader is not worker:
                size = self._update_bytes(group)
                self._move(size, worker, leader)
                sent += worker.machine.transfer_seconds(size)
            self._clock.at(sent, partial(self._deliver, worker, leader, offer, submission.payload))
        else:
            self._answer(worker, offer, offer.answer)
        self._clock.at(sent, partial(self._send, worker, round, outcome, groups[1:], measured_from))

    def _deliver(self, worker: Worker, leader: Worker, offer: Offer, payload: bytes) -> None:
        meter = offer.meter()
        for chunk in chunks(payload):
            meter.feed(chunk)
        facts = self._tried(leader, offer, meter.facts(), payload)
        answer = leader.desk.deliver(offer, facts, chunks(payload), self._clock.now)
        self._answer(worker, offer, answer)

    def _tried(self, leader: Worker, offer: Offer, facts: PayloadFacts, payload: bytes) -> PayloadFacts:
        aggregator = leader.desk.aggregator(offer.header.group)
        assert aggregator is not None
        collection = aggregator.collection
        if self._screen is None or not collection.is_worth_trying(offer.author, facts, self._clock.now):
            return facts
        scale = collection.scale_of(facts.norm)
        return replace(facts, worse_by=leader.screened(offer.header, payload, scale, self._screen))

    def _answer(self, worker: Worker, offer: Offer, answer: Answer) -> None:
        self._verdicts[answer.verdict] += 1
        worker.contributors[offer.header.group].answered(offer.receipt(answer))

    def _close(self, group: str, round: int) -> None:
        """At τ: also where all were heard before, as nobody would begin the next round any sooner."""
        rank, leader = self._leaders[group, round]
        aggregator = leader.desk.aggregator(group)
        assert aggregator is not None
        made = aggregator.close(self.versions[group].payload, rank)
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
            self.versions[group] = Version(made.vector, made.payload, Base.of(manifest), manifest)
            self._past[group].append(self.versions[group])
            leader.held[group] = manifest.digest

    # --- who and how well -------------------------------------------------------------------------

    def _initial(self, group: str) -> Version:
        vector = initial_vector(self.run, group) if self.text else dry.vector()
        payload = first_payload(self.run.training, vector)
        return Version(vector, payload, Base.initial(payload))

    def _worker(self, index: int, block: int) -> Worker:
        learner: Learner
        if self.text is None:
            learner = dry.DryLearner(self.run, self._seed, index)
        else:
            draws = int(stream(self._seed, 2, index).integers(2**63))
            learner = LocalTrainer(self.run, block, self.text, "cpu", draws, *self._speed)
        machine = self.regime.machine(self.run, self._seed, index)
        lengths = {group: len(version.vector) for group, version in self.versions.items()}
        worker = Worker(self.run, index, block, machine, learner, lengths, self._seed)
        worker.idle_since = self.slots.start(0)
        # A node's first guess is half a second, of slots of a minute. Here slots may be shorter than that.
        worker.pace.upload_seconds = sum(
            machine.transfer_seconds(self._update_bytes(group)) for group in worker.groups
        )
        return worker

    def _update_bytes(self, group: str) -> int:
        return encoded_size(self._elements[group], self.run.round.compression)

    def _move(self, size: int, sender: Worker, receiver: Worker) -> None:
        self._moved += size
        self.bytes_by_worker[sender.index] += size
        self.bytes_by_worker[receiver.index] += size

    def _report(self, round: int, evaluation: Evaluation | None) -> RoundReport:
        trained = len(self._outcomes)
        learnt = bool(trained) and self.text is not None
        return RoundReport(
            round=round,
            seconds=self._clock.now - self.slots.start(0),
            expected=sum(map(len, self._peers.values())),
            accepted=self._verdicts[Verdict.ACCEPTED],
            late=self._verdicts[Verdict.LATE],
            refused=self._verdicts[Verdict.REFUSED],
            away=int(self._mishaps.away.sum()),
            steps=sum(outcome.steps for outcome in self._outcomes) / trained if trained else 0.0,
            loss=fsum(outcome.loss for outcome in self._outcomes) / trained if learnt else None,
            ce=evaluation.ce if evaluation else [],
            ce_readout=evaluation.ce_readout if evaluation else None,
            tokens=sum(self.tokens) / len(self.tokens),
            bytes_moved=self._moved,
            busiest_bytes=max(map(int.__sub__, self.bytes_by_worker, self._moved_before)),
        )
