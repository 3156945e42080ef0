"""Turns steps of vLLM into step records. Uses no gRPC, and of vLLM only what its scheduler passes.

A step of vLLM verifies the drafts of the previous step and drafts for the next one. Its time is that of verifying one length
and drafting another, so it is a usable sample only if both are equal. `timing` has the rule for steps that overlap. Accepted
tokens are usable in nearly all steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

from speclen.integrations.vllm.timing import (
    DRIFT_STEPS,
    NUM_BEFORE,
    DeviceClock,
    Event,
    StepShape,
    device_flags,
    drifts_apart,
    overlap_flags,
)
from speclen.records import Arm, StepFlag, StepRecord
from speclen.worker.arms import ArmChoice

EMPTY: Set[str] = frozenset()
ORDINARY: frozenset[StepFlag] = frozenset()
MAX_PENDING = 64  # steps in flight; vLLM has two

# Classes of vLLM: Request, SchedulerOutput and ModelRunnerOutput. `engine.NEEDED` lists the attributes in use.
Request: TypeAlias = Any
Scheduled: TypeAlias = Any
Sampled: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of an engine that its reports depend on.

    ragged: the method proposes what it finds (n-grams), so shorter drafts are ordinary, and count at the requested length.
    Otherwise such steps mix lengths. overlapped: a step is scheduled before the previous one has ended. late_drafts: a
    result is read before the step's own drafts are made, which then take time of the next step. keeps_ended: vLLM may keep
    an ended request while its keys and values are read. longest_context: one longer sequence makes all drafts of its step
    void; None: no limit.
    """

    ragged: bool = False
    overlapped: bool = False
    late_drafts: bool = False
    keeps_ended: bool = False
    longest_context: int | None = None


@dataclass(slots=True)
class PendingStep:
    """A scheduled step. choice: the arm whose drafts it verifies.

    prompts: sequences in prefill; num_decoding does not count them. num_next: sequences that decode in the next step.
    verifies_void, drafts_void: True if these drafts are not predictions. over: sequences whose request ended before the
    result. mark: where the step begins in the device's stream, if there is a device clock.
    """

    scheduled: Scheduled
    started: float
    choice: ArmChoice
    shape: StepShape
    prompts: Set[str]
    num_next: int
    num_drafted_sequences: int
    num_drafts: int
    mean_context_length: float
    verifies_void: bool
    drafts_void: bool
    mark: Event | None = None
    over: Set[str] = EMPTY
    latency_s: float = 0.0


class StepTracker:
    """Follows the steps of one scheduler, by calls of `scheduled` and `drafts`, `arrived` with the result, then `finished`.

    clock: of the device; None if it cannot be read. With a clock, the record of a step is complete one step later.
    """

    def __init__(self, traits: Traits, first: ArmChoice, clock: DeviceClock | None = None) -> None:
        self.traits, self.clock = traits, clock
        self.num_odd = 0  # steps whose counts of sequences disagree; they are not reported
        self._drafting, self._drafts_void = first, False  # of the newest step
        self._pending: deque[PendingStep] = deque(maxlen=MAX_PENDING)
        self._before: deque[StepShape] = deque(maxlen=NUM_BEFORE)
        self._prefilling: Set[str] = EMPTY
        self._seen: set[tuple[int, int, int]] = set()
        self._arrived: PendingStep | None = None
        self._untimed: tuple[StepRecord, PendingStep, PendingStep | None] | None = None
        self._drifts: deque[float] = deque(maxlen=DRIFT_STEPS)  # host interval minus device interval of similar steps
        self._ended = 0.0
        self._busy = False

    def scheduled(self, output: Scheduled, requests: Mapping[str, Request], started: float) -> PendingStep | None:
        """Note a scheduled step before vLLM counts its tokens as computed. None for a step without tokens."""
        tokens = output.num_scheduled_tokens
        if not tokens:
            return None
        cached = output.scheduled_cached_reqs
        prompts, unfinished = EMPTY, EMPTY
        if output.scheduled_new_reqs or cached.resumed_req_ids or self._prefilling:
            prompts, unfinished = self._in_prompts(output, requests)
        drafts = Counter(map(len, output.scheduled_spec_decode_tokens.values()))  # sequences by draft tokens
        verified = max(drafts, default=0)
        if self.traits.ragged:
            verified = max(verified, self._drafting.arm.speculation_length)
        contexts = cached.num_computed_tokens
        step = PendingStep(
            scheduled=output,
            started=started,
            choice=self._drafting,
            shape=StepShape(len(tokens) - len(prompts), verified, verified, bool(prompts)),
            prompts=prompts,
            num_next=len(tokens) - len(unfinished),
            num_drafted_sequences=drafts.total() - drafts[0],
            num_drafts=sum(length * number for length, number in drafts.items()),
            mean_context_length=sum(contexts) / len(contexts) if contexts else 0.0,
            verifies_void=self._drafts_void,
            drafts_void=self._is_too_long(output, requests),
            mark=self.clock.mark() if self.clock else None,
        )
        self._drafts_void = step.drafts_void
        self._pending.append(step)
        return step

    def _in_prompts(self, output: Scheduled, requests: Mapping[str, Request]) -> tuple[Set[str], Set[str]]:
        """Sequences of a step that compute prompt tokens, and those among them that are not done after it."""
        tokens = output.num_scheduled_tokens
        prompts = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        prompts |= self._prefilling & tokens.keys()
        unfinished = {name for name in prompts if is_unfinished(requests[name], tokens[name])}
        self._prefilling = unfinished | {name for name in self._prefilling - tokens.keys() if name in requests}
        return prompts, unfinished

    def _is_too_long(self, output: Scheduled, requests: Mapping[str, Request]) -> bool:
        """True if a sequence exceeds the limit after the step."""
        longest, tokens = self.traits.longest_context, output.num_scheduled_tokens
        if longest is None:
            return False
        contexts = output.scheduled_cached_reqs.num_computed_tokens
        if not output.scheduled_new_reqs and max(contexts, default=0) + max(tokens.values()) <= longest:
            return False
        return any(requests[name].num_computed_tokens + num > longest for name, num in tokens.items())

    def drafts(self, step: PendingStep, choice: ArmChoice) -> None:
        """Note the arm for which the step drafts. From 0.33 on, vLLM skips drafts that no sequence could use."""
        self._drafting, shape = choice, step.shape
        is_without = step.drafts_void or getattr(step.scheduled, "skip_drafts", False)
        shape.drafted = 0 if is_without else choice.arm.speculation_length
        key = (shape.num_decoding, shape.verified, shape.drafted)
        shape.is_first = key not in self._seen
        self._seen.add(key)

    def arrived(self, output: Scheduled, requests: Mapping[str, Request], ended: float) -> None:
        """Note that the result of a step has arrived. vLLM has not processed it yet."""
        self._arrived = step = self._take(output)
        if step is None:
            self._busy = False  # a step without tokens does not count: the next one begins when it is scheduled
            return
        step.latency_s = ended - self._began(step)
        step.over = self._ended_requests(output, requests)
        self._ended = ended
        if self._pending:
            self._pending[0].shape.was_queued = True

    def _ended_requests(self, output: Scheduled, requests: Mapping[str, Request]) -> Set[str]:
        """Sequences whose request has ended. vLLM no longer cuts off their tokens, so their accepted runs are unknown."""
        tokens, find = output.num_scheduled_tokens, requests.get
        if not self.traits.keeps_ended:
            return {name for name in tokens if name not in requests}
        return {name for name in tokens if (one := find(name)) is None or one.is_finished()}

    def finished(self, sampled: Sampled, busy: bool) -> StepRecord | None:
        """The record of the step that arrived. Called after vLLM has cut off tokens after the end of each request.

        busy: True if requests remain. Returns None if no sequence shows how many tokens were accepted. With a device clock,
        returns the record of the previous step, which the device has certainly completed.
        """
        step, self._arrived = self._arrived, None
        if step is None:
            return None
        following = self._pending[0] if self._pending else None
        record = self._record(step, following, sampled)
        self._before.append(step.shape)
        self._busy = busy
        if self.clock is None:
            return record
        timed, self._untimed = self._timed(self.clock), record and (record, step, following)
        return timed

    def _timed(self, clock: DeviceClock) -> StepRecord | None:
        """The waiting record with the time of the device."""
        if self._untimed is None:
            return None
        record, step, following = self._untimed
        if following is None or step.mark is None or following.mark is None:
            return record
        device_s = clock.seconds(step.mark, following.mark)
        if device_s is None:
            return record._replace(flags=record.flags | {StepFlag.OVERLAP})
        record = record._replace(elapsed_s=record.latency_s)
        if record.flags:
            self._drifts.clear()
            return record._replace(latency_s=device_s)
        self._drifts.append(following.started - step.started - device_s)
        flags = frozenset({StepFlag.OVERLAP}) if drifts_apart(self._drifts, device_s) else ORDINARY
        return record._replace(latency_s=device_s, flags=flags)

    def _record(self, step: PendingStep, following: PendingStep | None, sampled: Sampled) -> StepRecord | None:
        skipped = step.prompts | step.over | invalid_drafts(step.scheduled)
        num_counted = len(step.scheduled.num_scheduled_tokens) - len(skipped)
        if not num_counted or not sampled.sampled_token_ids:
            return None
        histogram = accepted_histogram(sampled, skipped, step.shape.verified)
        if histogram is None or sum(histogram) != num_counted:
            self.num_odd += 1
            return None
        return StepRecord(
            seq=0,
            batch_size=step.shape.num_decoding,
            arm=Arm(step.shape.verified),
            latency_s=step.latency_s,
            accepted_histogram=histogram,
            mean_context_length=step.mean_context_length,
            decision_version=step.choice.decision_version,
            flags=self._flags(step, following),
            probe_id=step.choice.probe_id,
            num_drafted_sequences=step.num_drafted_sequences,
            num_verified_tokens=step.shape.num_decoding + step.num_drafts,
            num_new_sequences=len(step.scheduled.scheduled_new_reqs),
        )

    def _take(self, output: Scheduled) -> PendingStep | None:
        """The pending step of an output. Earlier pending steps are dropped, since vLLM gave them up."""
        for position, step in enumerate(self._pending):
            if step.scheduled is output:
                for _ in range(position + 1):
                    self._pending.popleft()
                return step
        return None  # a step without tokens, unrelated to those in flight

    def _began(self, step: PendingStep) -> float:
        """Start of a step's time: the end of the previous step, unless vLLM waited for requests in between."""
        if self.traits.overlapped:
            return max(step.started, self._ended)
        return self._ended if self._busy else step.started

    def _flags(self, step: PendingStep, following: PendingStep | None) -> frozenset[StepFlag]:
        shape, flags = step.shape, set()
        if shape.with_prefill or (self.traits.late_drafts and self._before and self._before[-1].with_prefill):
            flags.add(StepFlag.PREFILL)
        if step.verifies_void or (not self.traits.ragged and step.num_drafts != shape.verified * shape.num_decoding):
            flags.add(StepFlag.MIXED_LENGTHS)
        if shape.drafted != shape.verified:
            flags.add(StepFlag.CHANGED_ARM)
        if shape.is_first:
            flags.add(StepFlag.FIRST_USE)
        if self.traits.overlapped:
            rule = device_flags if self.clock else overlap_flags
            flags |= rule(self._before, shape, following.shape if following else None)
        return frozenset(flags) if flags else ORDINARY


def is_unfinished(request: Request, num_tokens: int) -> bool:
    """True if a sequence is still in prefill after a step that computes num_tokens of it."""
    return request.num_computed_tokens + num_tokens < request.num_tokens + request.num_output_placeholders


def invalid_drafts(output: Scheduled) -> Set[str]:
    """Sequences with draft tokens that a grammar forbids. Their rejection says nothing about the draft model."""
    invalid = output.num_invalid_spec_tokens
    return {name for name, num in invalid.items() if num} if invalid else EMPTY


def accepted_histogram(sampled: Sampled, skipped: Set[str], length: int) -> tuple[int, ...] | None:
    """Histogram of accepted runs, 0 to length, without skipped sequences; None if a run is longer."""
    rows = sampled.sampled_token_ids
    num_rows = Counter(map(len, rows))  # sequences by number of tokens, the bonus token included
    for index in map(sampled.req_id_to_index.get, skipped):
        if index is not None:
            num_rows[len(rows[index])] -= 1
    if any(number and tokens > length + 1 for tokens, number in num_rows.items()):
        return None
    return (num_rows[0] + num_rows[1], *(num_rows[run + 1] for run in range(1, length + 1)))
