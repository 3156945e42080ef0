"""Runs learners in a simulated world. Every learner gets the same requests, loads and noise.

A step is scored by its expected time relative to the oracle's for the same tokens. So noise affects what a learner observes,
but not its score.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque

import numpy as np

from speclen.bench.simulation.learners import Learner
from speclen.bench.simulation.level import GRID_S, NUM_DRAWN
from speclen.bench.simulation.texts import DRAFTS, OFFERED
from speclen.bench.simulation.world import LONG_LENGTH, NUM_REQUESTS, STALL_S, Scene, Site
from speclen.integrations.vllm.timing import NUM_BEFORE, StepShape, overlap_flags
from speclen.records import NUM_CLASSES, Arm, Probe, StepFlag, StepRecord

GROUP_S = 0.2  # between two deliveries, as recorded: 7 reports each in recording a, 12 in b
PROBE_VALID_S = 2.0
SHORT_S = 0.0005, 0.003  # of a report whose result arrived right after the previous one: see SHORT_SHARE
FAULTY_RATE = 16  # reports of a faulty worker for each of its steps
PREFILL_S = 0.004
MAX_PREFILLS = 32  # steps with prefill that do not count in a trial
WARM_STEPS = 3000  # before those that `late_percent` scores


class Score:
    """Time spent, and the oracle's for the same tokens, by thirds of the time."""

    def __init__(self) -> None:
        self.spent_s, self.work_s = [0.0] * 3, [0.0] * 3
        self.num_steps = self.num_probe_steps = self.num_trial_steps = 0
        self.late_spent_s = self.late_work_s = 0.0  # of the steps after the first WARM_STEPS
        self.lost_s = self.late_lost_s = 0.0  # by trials, relative to the arms in use

    @property
    def percent(self) -> float:
        """Goodput in percent of the oracle's."""
        return 100.0 * sum(self.work_s) / sum(self.spent_s)

    @property
    def late_percent(self) -> float:
        """Goodput in percent of the oracle's after the first WARM_STEPS steps; NaN if there are no later ones."""
        return 100.0 * self.late_work_s / self.late_spent_s if self.late_spent_s else math.nan

    @property
    def thirds(self) -> tuple[float, ...]:
        """Goodput in percent of the oracle's, by thirds of the time."""
        return tuple(100.0 * work / spent for work, spent in zip(self.work_s, self.spent_s, strict=True))


def play(learner: Learner, scene: Scene) -> Score:
    """Run the simulation with arms selected by a learner."""
    score = Score()
    workers = [Worker(site, learner, score) for site in scene.workers]
    if scene.world.last_is_faulty:
        workers[-1].is_faulty, workers[-1].score = True, Score()
    while (worker := min(workers, key=lambda each: each.now_s)).now_s < scene.seconds:
        worker.step()
    return score


class Worker:
    """A simulated worker: its requests, its undelivered reports, and the probe that it runs.

    A probe begins at a step without prefill within PROBE_VALID_S.
    """

    def __init__(self, site: Site, learner: Learner, score: Score) -> None:
        self.site, self.learner, self.score = site, learner, score
        self.is_faulty, self.now_s, self.seq = False, 0.0, 0
        self._waiting: list[StepRecord] = []
        self._sent: deque[tuple[float, list[StepRecord]]] = deque()
        self._due_s = GROUP_S
        self._probe: Probe | None = None
        self._steps_left, self._prefills_left, self._valid_until_s, self._carried_s = 0, 0, 0.0, 0.0
        self._last, self._alike, self._used = Arm(0), len(site.world.transition), set[tuple[int, Arm]]()
        self._queue = Queue() if site.world.overlapped else None
        self._at = self._end = self._text = np.zeros(0, dtype=np.int64)
        self._place = (-1, -1)
        self._begin()

    @property
    def _is_trial(self) -> bool:
        return self._probe is not None and self._probe.is_trial

    # Requests

    def _begin(self) -> bool:
        """Begin a phase of the load, or a stage of the world, if it is due. False if nothing changes."""
        site = self.site
        place = site.load.index_at(self.now_s), bisect_right(site.starts, self.now_s) - 1
        if place == self._place:
            return False
        kept = 0 if site.load.renewed or place[1] != self._place[1] else len(self._at)
        if site.load.renewed or place[1] != self._place[1]:
            self._next_request = 61 * sum(place) % NUM_REQUESTS
        self._place, self._truth, size = place, site.truths[place[1]], site.load.sizes[place[0]]
        self._outputs = self._truth.outputs
        if size > kept:
            grown = np.zeros((3, size), dtype=np.int64)
            grown[:, :kept] = self._at[:kept], self._end[:kept], self._text[:kept]
            self._at, self._end, self._text = grown
            self._admit(np.arange(kept, size))
        else:
            self._at, self._end, self._text = self._at[:size], self._end[:size], self._text[:size]
        self._num_new = max(size - kept, 0)
        self._rows: slice | np.ndarray = slice(None)
        self._recount()
        return True

    def _admit(self, rows: np.ndarray) -> None:
        """Replace the requests of some sequences by the next ones."""
        places = np.arange(self._next_request, self._next_request + len(rows)) % NUM_REQUESTS
        self._next_request += len(rows)
        texts = self.site.requests[places] % len(self._outputs.num_tokens)
        self._text[rows], self._at[rows] = texts, texts * self._outputs.longest
        self._end[rows] = self._at[rows] + self._outputs.num_tokens[texts]

    def _recount(self) -> None:
        rows = self._rows
        self.batch_size = len(self._at[rows])
        starts = self._text[rows] * self._outputs.longest
        self._held = int((self._outputs.prompts[self._text[rows]] + self._at[rows] - starts).sum())

    def _advance(self, tokens: np.ndarray, num_tokens: int) -> tuple[int, ...]:
        """Advance by a step, and return the outputs that ended. In vLLM, admitted sequences decode from the next step on."""
        rows = self._rows
        self._at[rows] += tokens
        self._held += num_tokens
        ended = (self._at >= self._end).nonzero()[0]
        texts: tuple[int, ...] = ()
        admitted = not isinstance(rows, slice)
        self._rows, self._num_new = slice(None), len(ended)
        if len(ended):
            texts = tuple(self._text[ended].tolist())
            self._admit(ended)
            if self._queue and len(ended) < len(self._at):
                self._rows = np.setdiff1d(np.arange(len(self._at)), ended, assume_unique=True)
        if len(ended) or admitted:
            self._recount()
        return texts

    # Steps

    def step(self) -> None:
        """Run a step. Deliver earlier reports first if that is due."""
        site, world = self.site, self.site.world
        if self.now_s >= self._due_s or self._sent:
            self._deliver()
        self.seq += 1
        drawn = self.seq % NUM_DRAWN
        with_prompts = self._num_new > 0 or site.prefills[drawn]
        arm, probe_id = self._select(with_prompts)
        batch, length, context = self.batch_size, arm.speculation_length, self._held / self.batch_size
        place = length + arm.ngram * (world.limits.max_speculation_length + 1)
        codes = self._outputs.codes[place][self._at[self._rows]]
        accepted, total = codes & 0xFFFF, int(codes.sum())
        num_drafting, num_verified = (total >> DRAFTS) & 0xFFFF, batch + (total >> OFFERED)
        passes = length if num_drafting else 0
        seconds, ratio = self._truth.at(batch, context)
        flags, extra_s = self._change(arm, batch, passes, num_drafting, seconds[place])
        level = site.level[int(self.now_s / GRID_S)]
        spent_s = level * (seconds[place] + extra_s)
        happened_s = self._truth.machine.step_s(batch, num_drafting, passes, num_verified, context) + extra_s
        if self._queue:  # the interval between two results covers both steps
            before = self._last.speculation_length
            before_s = self._truth.machine.step_s(batch, batch, before, batch * (1 + before), context)
            happened_s = (happened_s + before_s) / 2
        happened_s *= level * (site.drafting if passes else site.plain)[drawn]
        if with_prompts and not self._queue:
            happened_s += level * PREFILL_S
            flags.append(StepFlag.PREFILL)
        if StepFlag.FIRST_USE in flags:
            happened_s += world.first_use_s
        if site.stalls[drawn]:
            happened_s += STALL_S
        self._last = arm
        third = min(int(3 * self.now_s / site.seconds), 2)
        self.score.spent_s[third] += spent_s
        self.score.work_s[third] += level * seconds[place] * ratio[place]
        self.score.num_steps += 1
        self.score.num_probe_steps += probe_id > 0
        lost_s = 0.0
        if probe_id and self._is_trial:
            used = ratio[self._outputs.arms.index(self.learner.arm_for(batch, site.name))]
            self.score.num_trial_steps += 1
            lost_s = spent_s - level * seconds[place] * ratio[place] / used
        self.score.lost_s += lost_s
        if self.score.num_steps > WARM_STEPS:
            self.score.late_spent_s += spent_s
            self.score.late_work_s += level * seconds[place] * ratio[place]
            self.score.late_lost_s += lost_s
        histogram, by_class = self._histograms(accepted, arm.max_tokens)
        record = StepRecord(
            *(self.seq, batch, arm, happened_s, histogram, context, 1, frozenset(flags), probe_id, by_class),
            num_drafted_sequences=num_drafting,
            num_verified_tokens=num_verified,
            num_new_sequences=self._num_new,
        )
        record = self._clocked(record)
        self.now_s += happened_s
        outputs = self._outputs
        ended = self._advance(1 + accepted, batch + (total & 0xFFFF))
        changed = self._begin()
        if self._queue:
            self._overlap(self._queue, record, with_prompts, changed)
            return
        if ended and (share := world.evaluated) is not None:
            whole = site.chances[drawn]
            found = [outputs.evaluation(text, (whole + 0.618 * at) % 1.0 < share) for at, text in enumerate(ended)]
            record = record._replace(evaluations=tuple(found))
        self._report(record)

    def _change(
        self, arm: Arm, batch: int, passes: int, num_drafting: int, step_s: float
    ) -> tuple[list[StepFlag], float]:
        """Flags of a step, and seconds that the change of arm costs."""
        if self._queue:
            return [], 0.0
        flags, extra_s, transition = list[StepFlag](), 0.0, self.site.world.transition
        if passes and not self._last.speculation_length:
            flags.append(StepFlag.CATCH_UP)
            extra_s = self._truth.machine.pass_s + self._truth.machine.first_pass_s(num_drafting)
        if transition:
            self._alike = self._alike + 1 if arm == self._last else 0
            if self._alike < len(transition):
                extra_s += transition[self._alike] * step_s
                flags.append(StepFlag.CHANGED_ARM)
        if (batch, arm) not in self._used:
            self._used.add((batch, arm))
            flags.append(StepFlag.FIRST_USE)
        return flags, extra_s

    def _histograms(
        self, accepted: np.ndarray, most: int
    ) -> tuple[tuple[int, ...], tuple[tuple[int, tuple[int, ...]], ...]]:
        """Histograms of accepted tokens: of all sequences, and by class."""
        if len(self.site.world.texts.shares) == 1:
            return tuple(np.bincount(accepted, minlength=most + 1).tolist()), ()
        kinds = self._outputs.kinds[self._text[self._rows]]
        counts = np.bincount(kinds * (most + 1) + accepted, minlength=NUM_CLASSES * (most + 1)).tolist()
        rows = [tuple(counts[at : at + most + 1]) for at in range(0, len(counts), most + 1)]
        return tuple(map(sum, zip(*rows, strict=True))), tuple((at, row) for at, row in enumerate(rows) if any(row))

    # Reports

    def _clocked(self, record: StepRecord) -> StepRecord:
        """The record with the times that the worker's clock says."""
        clock, true_s = self.site.world.clock, record.latency_s
        if clock.late:
            said_s, self._carried_s = self._carried_s + (1.0 - clock.late) * true_s, clock.late * true_s
            return record._replace(latency_s=max(said_s, 1e-6))
        if clock.long_factor != 1.0 and record.arm.speculation_length >= LONG_LENGTH:
            return record._replace(latency_s=clock.long_factor * true_s, elapsed_s=true_s)
        return record

    def _overlap(self, queue: Queue, record: StepRecord, with_prompts: bool, changed: bool) -> None:
        """Report the steps whose flags are known. changed: True if a phase of the load ended with the step."""
        drawn = record.seq % NUM_DRAWN
        if ran_empty := self.site.ran_empty[drawn]:
            low, high = SHORT_S
            record = record._replace(latency_s=low + (high - low) * self.site.chances[drawn])
        queue.add(record, with_prompts, ran_empty)
        if changed:
            queue.drain()
        for each in queue.take():
            self._report(each)

    def _report(self, record: StepRecord) -> None:
        if self.is_faulty:
            self._waiting += [boast(record)] * FAULTY_RATE
        elif not self.site.lost[record.seq % NUM_DRAWN]:
            self._waiting.append(record)

    def _deliver(self) -> None:
        if self._waiting and self.now_s >= self._due_s:
            self._sent.append((self.now_s + self.site.world.late_s, self._waiting))
            self._waiting, self._due_s = [], self.now_s + GROUP_S
        while self._sent and self._sent[0][0] <= self.now_s:
            _, records = self._sent.popleft()
            self.learner.observe(records, self.site.name)
            if self._probe is None:
                self._probe = self.learner.probe_for(records[-1].batch_size, self.site.name)
                self._steps_left = self._probe.num_steps if self._probe else 0
                self._prefills_left = MAX_PREFILLS * self._is_trial
                self._valid_until_s = self.now_s + PROBE_VALID_S

    def _select(self, with_prompts: bool) -> tuple[Arm, int]:
        """Arm of the next step, and the id of the probe that selected it, or 0."""
        probe, size = self._probe, self.batch_size
        if probe is not None:
            fits, begun = probe.batch_min <= size <= probe.batch_max, self._steps_left < probe.num_steps
            if (begun and not (fits and self._steps_left)) or (not begun and self.now_s > self._valid_until_s):
                self._probe = None
            elif fits and (begun or not with_prompts):
                is_free = with_prompts and self._prefills_left > 0
                self._prefills_left -= is_free
                self._steps_left -= not is_free
                return probe.arm, probe.probe_id
        return self.learner.arm_for(size, self.site.name), 0


def boast(record: StepRecord) -> StepRecord:
    """The false report of a faulty worker: every draft token was accepted."""
    runs = (*(0 for _ in record.accepted_histogram[1:]), record.batch_size)
    return record._replace(accepted_histogram=runs, class_histograms=(), evaluations=())


class Queue:
    """Steps in flight of a worker whose steps overlap, as vLLM's do. Reports come two steps late, with the plugin's flags.

    In the recordings, steps flagged `prefill` and `first_use` take as long as others (ratios 1.00 and 1.05).
    """

    def __init__(self) -> None:
        self._before: deque[StepShape] = deque(maxlen=NUM_BEFORE)
        self._pending: deque[tuple[StepRecord, StepShape]] = deque()
        self._seen: set[tuple[int, int, int]] = set()
        self._reports: list[StepRecord] = []

    def add(self, record: StepRecord, with_prefill: bool, ran_empty: bool) -> None:
        """Add a step, and report the one two steps earlier, whose flags are known now."""
        length = record.arm.speculation_length
        if self._pending:
            self._drafted(self._pending[-1][1], length)
        was_queued = bool(self._pending) and not ran_empty
        self._pending.append(
            (record, StepShape(record.batch_size, length, length, with_prefill, was_queued=was_queued))
        )
        if len(self._pending) > 2:
            self._report(self._pending[1][1])

    def drain(self) -> None:
        """Report all remaining steps. The last one has no successor."""
        self._drafted(self._pending[-1][1], self._pending[-1][1].verified)
        while self._pending:
            self._report(self._pending[1][1] if len(self._pending) > 1 else None)

    def take(self) -> list[StepRecord]:
        """Return the reports since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def _drafted(self, shape: StepShape, length: int) -> None:
        shape.drafted = length
        key = (shape.num_decoding, shape.verified, length)
        shape.is_first = key not in self._seen
        self._seen.add(key)

    def _report(self, following: StepShape | None) -> None:
        record, shape = self._pending.popleft()
        flags = overlap_flags(self._before, shape, following)
        flags |= {StepFlag.PREFILL} if shape.with_prefill else set()
        flags |= {StepFlag.FIRST_USE} if shape.is_first else set()
        self._reports.append(record._replace(flags=frozenset(flags)))
        self._before.append(shape)
