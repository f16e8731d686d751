"""A worker's rounds: load the newest versions, train until τ is near, hand in, follow the new version."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Container

import structlog

from spheroid_node.errors import SpheroidError, TrainerFailed
from spheroid_node.model.parameters import elements
from spheroid_node.node.access import Client
from spheroid_node.node.clock import sleep_until
from spheroid_node.node.holdings import owns
from spheroid_node.node.outbox import Outbox
from spheroid_node.node.report import Report
from spheroid_node.node.submitting import Delivery, Submitter
from spheroid_node.node.sync import Synchroniser
from spheroid_node.node.threads import to_its_end
from spheroid_node.node.trainer import TrainerProcess
from spheroid_node.node.training import Trained, Training
from spheroid_node.node.versions import Held, VersionStore
from spheroid_node.rounds.contribution import Contributor
from spheroid_node.rounds.election import candidates
from spheroid_node.rounds.ledger import Submission
from spheroid_node.rounds.pacing import Pace
from spheroid_node.rounds.slots import Slots
from spheroid_node.run import INTERFACE_GROUP
from spheroid_node.training.trainer_protocol import Evaluate, Load, Save, Take
from spheroid_node.wire.codes import Verdict
from spheroid_node.wire.tensors import decode_vector, encode_vector

log = structlog.get_logger()

LOAD_SECONDS = 120.0
POLL_SECONDS = 0.5
RESTART_SECONDS = 2.0
PAUSE_SECONDS = 20.0
"""Before a trainer that could not be started is tried again."""
EVALUATION_WINDOWS = 32


class Worker:
    """Drives the trainer process through the run's rounds."""

    def __init__(
        self,
        client: Client,
        block: int,
        store: VersionStore,
        sync: Synchroniser,
        submitter: Submitter,
        trainer: TrainerProcess,
        report: Report,
        outbox: Outbox,
    ) -> None:
        self._client = client
        self._run = client.run
        self._store = store
        self._sync = sync
        self._submitter = submitter
        self._trainer = trainer
        self._report = report
        self._slots = Slots.of(client.run.round)
        self._groups = client.run.worker_groups(block)
        self._copied = client.run.copied_groups(block)
        self._watched = (*self._groups, *self._copied)
        """Own groups, and those that training reads."""
        self._contributors = {
            group: Contributor(client.run, group, elements(client.run, group)) for group in self._groups
        }
        self._outbox = outbox
        self._pace = Pace()
        self._training = Training(
            trainer, self._pace, self._slots, client.run.training.local_steps, client.dht.time
        )
        self._loaded: dict[str, bytes] = {}
        """Digest of the version that the trainer has, of each group."""
        self._carries_on = False
        """Whether the trainer has learnt something that is in no update yet."""
        self._done = -1
        """The round that this worker is done with."""
        self._missed = 0
        self._failures = 0
        self._not_saved = ""
        """Why the optimiser's state was not written last time."""

    async def run(self) -> None:
        """Take part in round after round, for ever. A trainer that dies costs the round it dies in."""
        self._done = await self._resume()
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._training.run(), name="training")
                    tasks.create_task(self._rounds(), name="rounds")
            except* TrainerFailed as errors:
                log.error("trainer.failed", round=self._done, cause=str(errors.exceptions[0]))
            self._failures += 1
            await asyncio.sleep(RESTART_SECONDS)
            self._loaded.clear()
            self._training.reset()
            self._carries_on = False
            # One that still answers is given one more try: after some errors of a GPU none succeeds.
            if self._failures > 1 or not self._trainer.is_running:
                await self._restart_trainer()

    async def _rounds(self) -> None:
        while True:
            held = await self._newest()
            # A round that has its version takes nothing more: a newcomer begins with the next.
            self._done = self._next_round(max(self._done, held[self._groups[0]].round))
            await self._begin(self._done, held)
            await self._take_part(self._done, held)
            self._failures = 0

    async def _resume(self) -> int:
        """Go on from what an earlier process had not seen in a version; returns the round it was done with.

        An update whose round still collects is handed in again: its aggregator may not have got it, and
        answers as it did before if it has.
        """
        resumed = -1
        submissions: dict[str, Submission] = {}
        for group, contributor in self._contributors.items():
            submission = await asyncio.to_thread(
                self._outbox.restore, group, contributor, self._slots.round_at(self._now())
            )
            if submission is None:
                continue
            round = submission.header.round
            if not self._slots.start(round) <= self._now() < self._slots.deadline(round):
                continue
            resumed, submissions[group] = round, submission
            log.info("round.handed_in_again", round=round, group=group)
        await asyncio.to_thread(self._outbox.tidy, self._slots.round_at(self._now()))
        if submissions:
            await asyncio.gather(*map(self._sync.sync, submissions))
            await self._settle(resumed, submissions, await self._hand_in(resumed, submissions))
        return resumed

    def _next_round(self, done: int) -> int:
        """The current round, or the next if the current one is done; no further, should clocks jump."""
        now = self._slots.round_at(self._now())
        return max(now, min(done, now) + 1)

    def _is_far(self, round: int) -> bool:
        """Whether it is so far ahead that our clock must have been, when it was taken for the next one."""
        return round > self._slots.round_at(self._now()) + 1

    # --- before training --------------------------------------------------------------------------

    async def _newest(self) -> dict[str, Held]:
        """Bring all watched groups up to date; the trainer goes on meanwhile."""
        synced = await asyncio.gather(*map(self._sync.sync, self._watched))
        held = dict(zip(self._watched, synced, strict=True))
        if self._run.interface == "frozen":
            held[INTERFACE_GROUP] = self._store.newest(INTERFACE_GROUP)
        for group, lag in self._copied.items():
            held[group] = await self._sync.behind(group, lag)
        await asyncio.gather(*map(self._settle_update, self._groups))
        return held

    async def _settle_update(self, group: str) -> None:
        """What became of the open update of a group, and whether that of those before still holds."""
        contributor = self._contributors[group]
        line = await self._sync.line(group, contributor.versions_wanted)
        settled, recounted = contributor.settle(line), contributor.recount(line)
        for update in recounted:
            log.info("round.recounted", group=group, update=update.digest.hex(), contained=update.contained)
        if settled is not None or recounted:
            await self._keep(group)

    async def _begin(self, round: int, held: dict[str, Held]) -> None:
        """Have the trainer go on from these versions."""
        async with self._training.loading():
            for group, version in held.items():
                if group in self._groups or self._loaded.get(group) != version.digest:
                    await self._load(version)
            self._carries_on = True
            await self._evaluate(round, held)

    async def _keep(self, group: str) -> None:
        round = self._slots.round_at(self._now())
        # To its end: an older state must not be written after a newer one.
        await to_its_end(self._outbox.save, group, self._contributors[group].kept(), round)

    async def _load(self, version: Held) -> None:
        """Own groups go on from the version with what is left over, and what was learnt meanwhile, on top."""
        contributor = self._contributors.get(version.group)
        left_over = None if contributor is None else contributor.left_over
        load = Load(
            group=version.group,
            version=version.version,
            steps=version.steps,
            vector=encode_vector(version.vector, "float32"),
            left_over=b"" if left_over is None else encode_vector(left_over, "float32"),
            carry=contributor is not None and self._carries_on,
        )
        await self._trainer.request(load, LOAD_SECONDS)
        self._loaded[version.group] = version.digest

    # --- a round ----------------------------------------------------------------------------------

    async def _take_part(self, round: int, held: dict[str, Held]) -> None:
        """No further than to where a clock turns out to have been wrong when the round was chosen.

        A wait notices a clock that is set back while it lasts, and no other: so it is asked before each.
        """
        if self._is_far(round):
            return
        stop_at = self._pace.stop_at(self._slots, round)
        if not self._pace.can_keep_up(self._slots):
            self._warn_too_slow()
        elif stop_at <= self._now():
            self._pace.skipped()
            await sleep_until(self._now, self._slots.start(round + 1))
            return
        await self._training.until(stop_at)
        # Training for a round may begin in the slot before, as soon as its versions are there.
        if not self._is_far(round):
            await sleep_until(self._now, self._slots.start(round))
        if self._is_far(round):
            return
        began = time.monotonic()
        submissions = await self._take(round, held)
        took = time.monotonic() - began
        deliveries = await self._hand_in(round, submissions)
        sent = [delivery.seconds for delivery in deliveries.values() if delivery is not None]
        if len(sent) == len(deliveries):  # else _deliver has said how long it took in vain
            self._pace.uploaded(took + max(sent))
        self._note_lateness(deliveries)
        await self._settle(round, submissions, deliveries)
        await self._save()
        log.info(
            "node.traffic",
            round=round,
            bytes_in=self._client.traffic.received,
            bytes_out=self._client.traffic.sent,
        )

    async def _evaluate(self, round: int, held: dict[str, Held]) -> None:
        reply = await self._trainer.request(Evaluate(windows=EVALUATION_WINDOWS), LOAD_SECONDS)
        ce = reply["ce"][-1]
        self._report.from_noise_ce = ce if math.isfinite(ce) else None
        self._report.touch()
        log.info(
            "round.evaluated",
            round=round,
            block=self._report.block,
            ce=reply["ce"],
            versions={group: version.version for group, version in held.items()},
        )

    async def _take(self, round: int, held: dict[str, Held]) -> dict[str, Submission]:
        """The updates of all groups, on disk before anybody has them; training goes on after it."""
        async with self._training.paused():
            reply = await self._trainer.request(Take(), LOAD_SECONDS)
            trained = self._training.take()
        self._log_trained(round, trained)
        submissions = {}
        for group in self._groups:
            version = held[group]
            base = version.base
            update = decode_vector(reply["updates"][group], "float32")
            try:
                submissions[group] = self._contributors[group].prepare(
                    round, base, update, trained.steps, trained.tokens, secrets.token_bytes(16)
                )
            except ValueError as error:  # not finite: it is never submitted
                raise TrainerFailed(str(error)) from error
            await self._keep(group)
        return submissions

    def _log_trained(self, round: int, trained: Trained) -> None:
        self._report.tokens_per_second = trained.tokens_per_second
        self._report.train_loss = trained.loss
        log.info(
            "round.trained",
            round=round,
            steps=trained.steps,
            tokens=trained.tokens,
            seconds=trained.seconds,
            upstream_seconds=trained.upstream_seconds,
            loss=trained.loss,
            tokens_per_second=trained.tokens_per_second,
        )

    async def _hand_in(self, round: int, submissions: dict[str, Submission]) -> dict[str, Delivery | None]:
        """Hand in the updates of all groups at once."""
        results = await asyncio.gather(*(self._deliver(round, item) for item in submissions.values()))
        deliveries = dict(zip(submissions, results, strict=True))
        self._report.round = round
        for group, delivery in deliveries.items():
            if delivery is not None:
                await self._answered(group, delivery)
        self._report.touch()
        return deliveries

    async def _answered(self, group: str, delivery: Delivery) -> None:
        self._contributors[group].answered(delivery.receipt)
        await self._keep(group)
        self._report.verdicts[delivery.receipt.verdict] += 1

    async def _deliver(
        self, round: int, submission: Submission, lost: Container[str] = ()
    ) -> Delivery | None:
        """To the first in the ranking that answers and is not ``lost``; None, and said so, if nobody does."""
        nodes = await self._sync.nodes()
        group = submission.header.group
        eligible = {peer for peer, record in nodes.items() if owns(record, group)}
        eligible.add(self._client.identity.peer)
        ranked = [peer for peer in candidates(self._run, group, round, eligible) if peer not in lost]
        began = time.monotonic()
        delivery = await self._submitter.deliver(submission, ranked, nodes)
        if delivery is None:
            seconds = time.monotonic() - began
            self._pace.not_delivered(seconds, self._slots)
            log.warning(
                "round.not_delivered",
                round=round,
                group=group,
                seconds=round_up(seconds),
                remedy="look at this machine's network; what was learnt goes with the next update",
            )
        return delivery

    # --- after it ---------------------------------------------------------------------------------

    async def _settle(
        self, round: int, submissions: dict[str, Submission], deliveries: dict[str, Delivery | None]
    ) -> None:
        """Wait until every watched group has its version of ``round``, or the slot is over."""
        end = self._slots.end(round)
        pushed = [
            asyncio.create_task(self._see_through(round, submissions[group], deliveries))
            for group, delivery in deliveries.items()
            if delivery is not None
        ]
        try:
            while self._now() < end and not self._is_far(round) and self._waiting_for(round):
                await asyncio.wait(pushed or [asyncio.create_task(asyncio.sleep(0))], timeout=POLL_SECONDS)
                behind = [group for group in self._waiting_for(round) if group not in self._groups]
                if all(task.done() for task in pushed):
                    behind = self._waiting_for(round)
                    await asyncio.sleep(POLL_SECONDS)
                await asyncio.gather(*map(self._sync.sync, behind))
        finally:
            for task in pushed:
                task.cancel()
            await asyncio.gather(*pushed, return_exceptions=True)
            for delivery in deliveries.values():
                if delivery is not None and delivery.link is not None:
                    delivery.link.abort()  # also of a task that was cancelled before it began
        self._report.touch()

    async def _see_through(
        self, round: int, submission: Submission, deliveries: dict[str, Delivery | None]
    ) -> None:
        """Wait for the manifest; where the aggregator is lost before τ, the next in rank takes over."""
        group, lost = submission.header.group, set[str]()
        while (delivery := deliveries[group]) is not None:
            if await self._submitter.await_manifest(delivery, self._slots.end(round) - self._now()):
                return
            lost.add(delivery.aggregator)
            if self._now() >= self._slots.deadline(round):
                return
            log.warning("round.aggregator_lost", round=round, group=group, aggregator=delivery.aggregator)
            deliveries[group] = successor = await self._deliver(round, submission, lost)
            if successor is not None:
                await self._answered(group, successor)

    def _waiting_for(self, round: int) -> list[str]:
        return [group for group in self._watched if self._store.newest(group).round < round]

    def _note_lateness(self, deliveries: dict[str, Delivery | None]) -> None:
        verdicts = [delivery.receipt.verdict for delivery in deliveries.values() if delivery is not None]
        self._missed = self._missed + 1 if Verdict.LATE in verdicts else 0
        self._report.note = self._lateness()

    def _lateness(self) -> str:
        """For the owner; empty while this machine makes its rounds."""
        if not self._pace.can_keep_up(self._slots):
            needed, available = self._pace.needed(), self._slots.period - self._slots.settle
            return f"too slow: needs {needed:.0f} s, a round leaves {available:.0f} s"
        return f"late in {self._missed} rounds in a row" if self._missed > 1 else ""

    def _warn_too_slow(self) -> None:
        self._report.note = self._lateness()
        log.warning(
            "round.too_slow",
            needed_seconds=round_up(self._pace.needed()),
            available_seconds=self._slots.period - self._slots.settle,
            remedy="a faster device, more --threads, a faster link, or a run with a longer period",
        )

    async def _save(self) -> None:
        """Keep the optimiser's state. A disk that is full costs the moments at the next start, no more."""
        try:
            await self._trainer.request(Save(), LOAD_SECONDS)
        except TrainerFailed as error:
            if error.problem != self._not_saved:  # told once, not every round
                log.error("trainer.not_saved", cause=error.problem)
            self._not_saved = error.problem
            if not self._trainer.is_running:
                raise
        else:
            self._not_saved = ""

    async def _restart_trainer(self) -> None:
        """Whatever keeps it from starting may pass: text on a disk that is away, a GPU, memory."""
        try:
            await self._trainer.start()
        except (SpheroidError, OSError) as error:
            self._report.note = f"no trainer: {error}"
            self._report.touch()
            log.error("trainer.not_restarted", cause=str(error))
            await asyncio.sleep(PAUSE_SECONDS)
        else:
            self._report.note = self._lateness()

    def _now(self) -> float:
        return self._client.dht.time()


def round_up(seconds: float) -> float:
    """To tenths, for log lines."""
    return -(-seconds * 10 // 1) / 10
