"""What the service does, without a word of gRPC: workers come and report, tables go back.

The heart is `take` (sort out repetitions, refuse what is not plausible) and `learn` (update the estimator, note it for
the disk). Between the two, reports wait for each other, up to 200 ms: what a call of the estimator costs hardly depends
on the number of reports in it, and an answer does not have to wait for it.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, groupby

import structlog

from speclen.controller.estimator.core import (
    ContextKey,
    Decision,
    DriftEvent,
    LearnedRow,
    Limits,
    Mix,
    ObserveOutcome,
    Probe,
    Profile,
    Table,
)
from speclen.controller.estimator.estimator import Estimator
from speclen.controller.estimator.prediction import PredictionError
from speclen.controller.service.journal import Journal
from speclen.controller.service.news import News
from speclen.controller.service.registry import RegisteredContext, Registration, Registry, Worker
from speclen.controller.service.thinning import Thinning
from speclen.controller.wire.ingest import Group, Origin, read_reports
from speclen.controller.wire.sums import MAX_STEPS, check_span, read_window
from speclen.controller.wire.validation import InvalidMessageError
from speclen.store.records import ReportRow
from speclen.v1 import control_pb2 as pb

log = structlog.get_logger()

# Workers with another policy do not use the table, so a probe would be lost on them.
FOLLOWS_TABLE = ("", "adaptive")
# Reports that are learned from without waiting for more: by then the estimator's cost per call is spread
# thin, and one call still takes less than two milliseconds.
MANY_REPORTS = 512
# The same where waiting costs most: in a context that has taught fewer than MANY_REPORTS so far, and of a worker faster than
# real time, such as a simulated one, which would play hundreds of steps by what was known before them.
FEW_REPORTS = 8
# Where reports of more workers wait they share calls: one controller answers so many that none of them gets far meanwhile.
FEW_WORKERS = 16
# Between two calls of the estimator that did not wait, answer for so many times as long as the first one took.
ANSWER_SHARE = 2.0
# A worker is faster than real time if its steps took this much longer than they were apart, in seconds, where it may take no
# more than half as long as it says (steps may overlap). Real ones hold reports back for half a second. It is forgotten soon.
AHEAD_S, MOST_AHEAD_S, REAL_TIME_FACTOR = 1.0, 2.0, 2.0
# Seconds for which reports wait for others. Simulated first minutes do not tell 50 ms of staleness from 300.
LEARN_INTERVAL_S = 0.2
# The same where reports are added up, and have waited for their window before.
LEARN_THINNED_S = 0.1
# Workers in one call of the estimator at most: it judges each one's step times against the others', and an answer may have
# to wait for the call, which takes about a millisecond for so many.
MANY_WORKERS = 4
# The same where reports are added up: nobody waits for an answer as for one of a single step then. 2.5 ms.
MANY_THINNED = 32
# The same for workers that it does not tell apart: 10 ms.
MANY_OTHERS, MANY_OTHER_REPORTS = 1024, 4096
# Place of the number of steps in a row of Group.
NUM_STEPS = ReportRow._fields.index("num_steps") - 1
# Seconds after which a worker is told anew how unlike classes of requests are: 3 to 15 kB.
MIX_INTERVAL_S = 5.0
# Bounds of the histogram of how long reports wait to be learned from, in seconds.
WAITS_S = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0)
# A worker that was heard so lately is alive: another one of its name, elsewhere, is no restart of it.
RIVAL_HEARD_S = 5.0
# Relative gain of a decision that is told at once to workers who add their steps up. A large fleet's lengths move several
# times a second by what is worth less, and telling thousands each time would take more than a core. All are told again no
# sooner than after a pause, in seconds.
URGENT_GAIN, URGENT_PAUSE_S = 0.05, 0.25
# Seconds after which the database is told that a worker without reports is alive.
QUIET_NOTE_S = 10.0


@dataclass(slots=True)
class Totals:
    """Counts since the start of the process, for the metrics. Refused, drift: by reason, by factor."""

    num_reports: int = 0
    num_thinned: int = 0  # counted, and neither learned from nor kept, since others' were fresher
    num_rows: int = 0  # what they came as: a sum of several is one
    num_repeated: int = 0
    num_missing: int = 0
    num_groups: int = 0
    # How long reports waited to be learned from: workers with reports by the bounds of WAITS_S, then those beyond; the sum.
    waits: list[int] = field(default_factory=lambda: [0] * (len(WAITS_S) + 1))
    waited_s: float = 0.0
    num_decisions: int = 0
    num_probes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    drift: Counter[str] = field(default_factory=Counter)

    def add_wait(self, seconds: float) -> None:
        """A worker's oldest report has waited so long."""
        self.waits[bisect_left(WAITS_S, seconds)] += 1
        self.waited_s += max(seconds, 0.0)


class LearningService:
    """Estimator, registry and journal, kept in step. Everything happens on one thread.

    news: gets the workers of a context when a length in its table has changed.
    """

    def __init__(
        self,
        estimator: Estimator,
        registry: Registry,
        journal: Journal,
        clock: Callable[[], float],
        news: News,
        last_group_id: int = 0,
    ) -> None:
        self.estimator = estimator
        self.registry = registry
        self.journal = journal
        self.clock = clock
        self.last_group_id = last_group_id
        self.totals = Totals()
        self.thinning = Thinning()
        self.prediction: dict[ContextKey, PredictionError] = {}
        self.news = news
        self._tables: dict[ContextKey, dict[tuple[int, int], Table]] = {}
        self._mixes: dict[tuple[ContextKey, tuple[int, int]], tuple[int, float, Mix | None]] = {}
        self._waiting: dict[str, Worker] = {}
        # By context: kind and bucket, limits and steps, for which there is no probe to give until more is learned.
        self._no_probe: dict[ContextKey, set[tuple[object, ...]]] = {}
        self._patient_until = 0.0  # by time.perf_counter: until then reports wait for others in any case

    def register(self, registration: Registration) -> Worker:
        """Introduce a worker; raises what Registry.register raises."""
        known = self.registry.workers.get(registration.worker_id)
        if known is not None:
            self.learn(known)
        rival = self._rival_of(registration)
        worker = self.registry.register(registration)
        self._prepare(worker.context)
        if rival:
            self._note(worker.context, ObserveOutcome([], [DriftEvent(worker.context.key, "worker", 1.0, rival)]))
        self.journal.note_worker(worker)
        return worker

    def _rival_of(self, registration: Registration) -> str:
        """What is to be said where a worker comes under a name whose owner, elsewhere, has just been heard; else ""."""
        known = self.registry.workers.get(registration.worker_id)
        if known is None or registration.epoch <= known.epoch or registration.address == known.address:
            return ""
        if not known.address or self.clock() - known.last_seen_at > RIVAL_HEARD_S:
            return ""  # a worker that moved
        words = f"two workers call themselves {known.worker_id}"
        where = ((known.context.key.device, known.address), (registration.key.device, registration.address))
        sentence = (
            f"{words}: {' and '.join(f'{device} at {address}' for device, address in where)}; the newer one counts"
        )
        log.error("two workers have one name", worker=known.worker_id, detail=sentence)
        return sentence

    def apart(self, key: ContextKey) -> int:
        """Workers of a context that turned out to be unlike the others, and are learned from for themselves."""
        return self.estimator.num_apart(key)

    def _prepare(self, context: RegisteredContext) -> None:
        key = context.key
        before = self.estimator.limits(key) if self.estimator.knows(key) else None
        outcome = self.estimator.add_context(key, context.limits)
        if self.estimator.limits(key) != before:
            self.journal.note_limits(context, self.last_group_id)
        self._tables.pop(key, None)
        self._note(context, outcome)

    def find(self, worker_id: str, epoch: int) -> Worker:
        """The worker of this name and epoch; raises what Registry.find raises."""
        return self.registry.find(worker_id, epoch)

    @property
    def contexts(self) -> tuple[ContextKey, ...]:
        """Every context known."""
        return tuple(self.registry.contexts)

    @property
    def num_workers(self) -> int:
        """Workers known."""
        return len(self.registry.workers)

    async def wait_for_room(self) -> None:
        """Return at once, except when a working disk is too far behind."""
        await self.journal.wait_for_room()

    def take(
        self, worker: Worker, reports: Sequence[pb.StepReport], windows: Sequence[pb.ReportWindow] = ()
    ) -> list[InvalidMessageError]:
        """Note reports of one worker, each of them once, then windows; says what was refused and why."""
        now = self.clock()
        worker.ahead_s = max(0.0, worker.ahead_s - REAL_TIME_FACTOR * max(0.0, now - worker.last_seen_at))
        worker.last_seen_at = now
        if worker.window.close_gaps(now):
            self.journal.note_worker(worker)
        if not reports and not windows:
            if now - worker.noted_at > QUIET_NOTE_S:
                self.journal.note_worker(worker)
            return []
        reports = self._without_repetitions(worker, reports)
        origin = Origin(worker.context.context_id, worker.worker_key, worker.epoch, now)
        num_before = len(worker.group.observations)
        refusals = read_reports(reports, worker.limits, origin, worker.group)
        if reports and not windows:
            worker.teaches = True  # whatever its windows did, when it still made some
        told_s = sum(step.latency_s for step in worker.group.observations[num_before:])
        worker.ahead_s = min(worker.ahead_s + told_s, MOST_AHEAD_S)
        num_steps = len(reports)
        for window in windows:
            num_steps += self._take_window(worker, window, origin, refusals)
        self.thinning.count(num_steps)
        if refusals:
            worker.num_refused += len(refusals)
            self.totals.refused.update(error.reason for error in refusals)
        if worker.group.rows:
            if worker.worker_id not in self._waiting:
                worker.waiting_since = now
            self._waiting[worker.worker_id] = worker
        else:
            self.journal.note_worker(worker)
        return refusals

    def _take_window(
        self, worker: Worker, window: pb.ReportWindow, origin: Origin, refusals: list[InvalidMessageError]
    ) -> int:
        """Note a window of one worker, once; returns its steps. A refusal is added to the others."""
        seqs, num_steps = worker.window, min(max(window.last_seq - window.first_seq + 1, 1), MAX_STEPS)
        missing, repeated = seqs.num_missing, seqs.num_repeated
        try:
            check_span(window)
            new = seqs.admit_window(window.first_seq, window.last_seq)
            if new is None:
                raise overlapping(window, seqs.applied_seq)
            if new and worker.teaches:
                refusals += read_window(window, worker.limits, origin, worker.group)
            elif new:
                self.totals.num_thinned += num_steps
                worker.num_reports += num_steps
            worker.teaches = self.learns_from(worker)  # what began before it was told is as old as its window was long
        except InvalidMessageError as error:
            refusals.append(error)
            worker.num_refused += num_steps - 1  # one is counted with the refusal
            self.totals.refused[error.reason] += num_steps - 1
        self.totals.num_missing += seqs.num_missing - missing
        self.totals.num_repeated += seqs.num_repeated - repeated
        return num_steps

    def learns_from(self, worker: Worker) -> bool:
        """Whether a worker is one of those that are learned from: all, except in a fleet that is too large for that."""
        return self.thinning.windows.learns_from(worker.worker_id, self._is_told_apart(worker), self.clock())

    def judge_load(self, now: float, workers: Sequence[Worker]) -> None:
        """Choose anew what workers add up. workers: that have a stream; now: by time.monotonic, about a second later."""
        self.thinning.judge(now, len(workers), sum(map(self._is_told_apart, workers)))

    def learn(self, *workers: Worker) -> None:
        """Learn from the reports that wait of some workers of one context, in one call of the estimator."""
        workers = tuple(worker for worker in workers if self._waiting.pop(worker.worker_id, None) is not None)
        if not workers:
            return
        context = workers[0].context
        observations = [step for worker in workers for step in worker.group.observations]
        senders = [worker.worker_id for worker in workers for _ in worker.group.observations]
        try:
            self._compare(workers)
            outcome = self.estimator.observe(context.key, observations, senders)
        except Exception:  # a mistake of ours must not become a crash that every resent report repeats
            log.exception("the estimator failed, a group is not learned from", workers=sorted(set(senders)))
            self._give_up(workers)
            self._start_anew(context)
            return
        self.last_group_id += 1
        self.totals.num_reports += sum(each.num_steps for each in observations)
        self.totals.num_rows += len(observations)
        context.num_learned += len(observations)
        self.totals.num_groups += 1
        now = self.clock()
        for worker in workers:
            self.totals.add_wait(now - worker.waiting_since)
            rows, worker.group = worker.group.rows, Group()
            worker.num_reports += num_steps_of(rows)
            self.journal.note_reports(worker, [(self.last_group_id, *row) for row in rows])
        self._no_probe.pop(context.key, None)
        self._note(context, outcome)

    def _start_anew(self, context: RegisteredContext) -> None:
        """Forget what is believed of a context after a mistake of ours, which could repeat itself otherwise."""
        try:
            self._note(context, self.estimator.start_anew(context.key, "the estimator failed"))
        except Exception:
            log.exception("a context cannot start anew", context=str(context.key))

    def _give_up(self, workers: Iterable[Worker]) -> None:
        """Forget the reports that wait, and count them."""
        for worker in workers:
            num_steps = num_steps_of(worker.group.rows)
            self.totals.refused["estimator"] += num_steps
            worker.num_refused += num_steps  # they teach nothing, but the database says that they came
            worker.group = Group()
            self.journal.note_worker(worker)

    def learn_if_many(self, worker: Worker) -> None:
        """Do not wait for more reports when there are plenty, or when much would have been played by the time they come."""
        num_rows = len(worker.group.rows)
        if num_rows >= MANY_REPORTS:
            self.learn(worker)
        elif num_rows >= FEW_REPORTS and self._is_waiting_dear(worker) and time.perf_counter() >= self._patient_until:
            started = time.perf_counter()
            self.learn(worker)
            now = time.perf_counter()
            self._patient_until = now + ANSWER_SHARE * (now - started)

    def _is_waiting_dear(self, worker: Worker) -> bool:
        """Whether a worker plays much meanwhile, or hardly anything is known, and few others wait with it."""
        dear = worker.ahead_s > AHEAD_S or worker.context.num_learned < MANY_REPORTS
        return dear and len(self._waiting) <= FEW_WORKERS

    async def learn_for_ever(self) -> None:
        """Learn a few times a second from what has come meanwhile; cancel to stop."""
        while True:
            await asyncio.sleep(LEARN_THINNED_S if self.thinning.windows.window_s else LEARN_INTERVAL_S)
            await self.learn_all()

    async def learn_all(self) -> None:
        """Learn from everything that waits now; between two calls of the estimator, answer for as long as it took."""
        for workers in batches(list(self._waiting.values()), self._is_told_apart, self.most_workers):
            started = time.perf_counter()
            # One that has registered anew in the meantime may have another context by now.
            self.learn(*(worker for worker in workers if worker.context is workers[0].context))
            await asyncio.sleep(time.perf_counter() - started)

    @property
    def most_workers(self) -> int:
        """In one call of the estimator, of those told apart."""
        return MANY_THINNED if self.thinning.windows.window_s else MANY_WORKERS

    def _is_told_apart(self, worker: Worker) -> bool:
        return self.estimator.tells_apart(worker.context.key, worker.worker_id)

    def _without_repetitions(self, worker: Worker, reports: Sequence[pb.StepReport]) -> Sequence[pb.StepReport]:
        window = worker.window
        missing, repeated = window.num_missing, window.num_repeated
        new = window.admit([report.seq for report in reports])
        if new is None:
            return reports
        self.totals.num_missing += window.num_missing - missing
        self.totals.num_repeated += window.num_repeated - repeated
        return list(compress(reports, new))

    def _compare(self, workers: Sequence[Worker]) -> None:
        """Note what each worker's table had promised for its steps."""
        key = workers[0].context.key
        prediction = self.prediction.get(key)
        if prediction is None:
            prediction = self.prediction[key] = PredictionError()
        for worker in workers:
            prediction.add(self.table(worker), worker.group.observations)

    def _note(self, context: RegisteredContext, outcome: ObserveOutcome) -> None:
        if outcome.decisions or outcome.drift_events:
            self.totals.num_decisions += len(outcome.decisions)
            self.totals.drift.update(event.factor for event in outcome.drift_events)
            for event in outcome.drift_events:
                if event.factor == "reset":
                    log.error("a context starts anew", context=str(context.key), reason=event.detail)
            self.journal.note_outcome(context, outcome, self.last_group_id)
            self._tables.pop(context.key, None)
            if outcome.decisions:
                self.news.note(context.workers)
                if any(map(is_urgent, outcome.decisions)):
                    tell_all(context, time.monotonic())

    def kind_of(self, worker: Worker) -> tuple[int, int]:
        """Workers of one context and kind have one table; (0, 0) is everybody who is not unlike the others."""
        return self.estimator.models_of(worker.context.key, worker.worker_id)

    def table(self, worker: Worker) -> Table:
        """The table in use. Its lengths are of this moment, its expected times at most as old as `refresh` allows."""
        key, kind = worker.context.key, self.kind_of(worker)
        tables = self._tables.setdefault(key, {})
        table = tables.get(kind)
        if table is None:
            table = tables[kind] = self.estimator.table(key, worker.worker_id)
        return table

    def mix(self, worker: Worker) -> Mix | None:
        """The numbers by which the worker weighs requests of unlike classes; None where all seen so far are of one.

        They move with every report; workers get them anew when their table changes, and every few seconds.
        """
        key, kind, now = worker.context.key, self.kind_of(worker), time.monotonic()
        if not self.estimator.is_mixed(key):
            return None
        kept = self._mixes.get((key, kind))
        version = self.table(worker).version
        if kept is None or kept[0] != version or now - kept[1] > MIX_INTERVAL_S:
            kept = self._mixes[key, kind] = (version, now, self.estimator.mix(key, worker.worker_id))
        return kept[2]

    def refresh(self) -> None:
        """Have expected times computed anew; lengths never need it. To be called about once a second."""
        self._tables.clear()

    def take_probes(self, worker: Worker, batch_size: int, lengths_alone: bool = False) -> list[Probe]:
        """Exploratory lengths for the next steps of this worker, mostly none, at most two: see the policy's length 0.

        lengths_alone: no plan that copies.
        """
        probe = self.take_probe(worker, batch_size, lengths_alone)
        if probe is None:
            return []
        second = None
        if self.estimator.probe_goes_on(worker.context.key, batch_size, worker.worker_id):
            second = self.take_probe(worker, batch_size, lengths_alone)
        return [probe] if second is None else [probe, second]

    def take_probe(self, worker: Worker, batch_size: int, lengths_alone: bool = False) -> Probe | None:
        """An exploratory length or plan for one step of this worker, mostly none. lengths_alone: no plan that copies."""
        key = worker.context.key
        follows = worker.policy in FOLLOWS_TABLE and worker.teaches
        if not follows or not 0 < batch_size <= worker.limits.max_batch_size:
            return None
        asked = self._no_probe.setdefault(key, set())
        longest = worker.limits.max_speculation_length
        copied = 0 if lengths_alone else worker.limits.max_copied_tokens
        # A worker that asks for every length by itself is given each probe for one step.
        steps = 1 if lengths_alone else worker.probe_steps
        place = self.kind_of(worker), self.estimator.bucket_index(key, batch_size), longest, copied, steps
        if place in asked:
            return None
        try:
            probe = self.estimator.take_probe(key, batch_size, longest, worker.worker_id, copied, steps)
        except Exception:
            log.exception("the estimator failed to give a probe", context=str(key))
            self._start_anew(worker.context)
            return None
        if probe is None:
            asked.add(place)
            return None
        self.totals.num_probes += 1
        return probe

    def import_profile(self, key: ContextKey, profile: Profile) -> int:
        """Seed a context, known or new; returns the profile's id. Raises FullError."""
        cells = profile.cells
        limits = Limits(
            max(cell.batch_size for cell in cells),
            max(len(profile.survival), max(cell.speculation_length for cell in cells)),
        )
        context = self.registry.context(key, limits)
        self._prepare(context)
        profile_id = self.journal.note_profile(context, profile, self.last_group_id)
        self._note(context, self.estimator.seed_profile(key, profile))
        return profile_id

    def learned(self, key: ContextKey) -> tuple[int, list[LearnedRow]]:
        """Version of the table and every row learned. Raises KeyError for an unknown context."""
        return self.estimator.table(key).version, self.estimator.learned_rows(key)


def batches(
    workers: Iterable[Worker],
    told_apart: Callable[[Worker], bool] = lambda worker: True,
    most_told_apart: int = MANY_WORKERS,
) -> Iterator[list[Worker]]:
    """Workers of one context at a time, together with enough reports for a call of the estimator, but not too many.

    told_apart: whether the estimator judges a worker by itself. Reports of the others cost it little more than one's.
    """

    def kind(worker: Worker) -> tuple[int, bool]:
        return worker.context.context_id, not told_apart(worker)

    for (_, as_one), members in groupby(sorted(workers, key=kind), key=kind):
        most_workers, most_reports = (MANY_OTHERS, MANY_OTHER_REPORTS) if as_one else (most_told_apart, MANY_REPORTS)
        batch, num_rows = [], 0
        for worker in members:
            batch.append(worker)
            num_rows += len(worker.group.rows)
            if len(batch) >= most_workers or num_rows >= most_reports:
                yield batch
                batch, num_rows = [], 0
        if batch:
            yield batch


def is_urgent(decision: Decision) -> bool:
    """Whether workers that add their steps up should hear of it before they ask: of the first one, and of a large gain."""
    before, now = decision.previous_ms_per_token, decision.ms_per_token
    return before is None or now is None or before > (1.0 + URGENT_GAIN) * now


def tell_all(context: RegisteredContext, now: float) -> None:
    """Have all workers hear of what is urgent: now, or after the pause that follows the last time."""
    if context.urgent_at <= now:
        context.urgent_at = max(now, context.urgent_at + URGENT_PAUSE_S)


def num_steps_of(rows: Iterable[tuple[object, ...]]) -> int:
    """Steps that rows stand for. rows: as in Group."""
    return sum(row[NUM_STEPS] for row in rows)  # type: ignore[misc]


def overlapping(window: pb.ReportWindow, applied_seq: int) -> InvalidMessageError:
    """A window of which a part was seen: what it would count twice cannot be told."""
    sentence = f"window {window.first_seq} to {window.last_seq} begins before {applied_seq + 1}, and ends after it"
    return InvalidMessageError("window", f"{sentence}: send again what was sent before, or what follows it")
