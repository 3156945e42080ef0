"""Steps of vLLM in the words of our reports. Knows nothing of gRPC, and of vLLM only what its scheduler hands on.

A step of vLLM verifies the drafts of the step before it and drafts for the one after it. Its time is therefore that of
verifying the one length and drafting the other, and teaches where both are the same; what was accepted teaches always.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Protocol

from speclen.records import Arm, StepFlag, StepRecord
from speclen.worker.drafting.arm_chooser import ArmChoice

NOBODY: Set[str] = frozenset()
ORDINARY: frozenset[StepFlag] = frozenset()
MAX_PENDING = 64  # steps on their way at once; vLLM has two, and as many more as it has pipeline stages


class Request(Protocol):
    """vllm.v1.request.Request, as far as it is looked at."""

    num_computed_tokens: int
    num_tokens: int
    num_output_placeholders: int


class NewRequest(Protocol):
    """vllm.v1.core.sched.output.NewRequestData."""

    req_id: str


class CachedRequests(Protocol):
    """vllm.v1.core.sched.output.CachedRequestData."""

    resumed_req_ids: set[str]
    num_computed_tokens: list[int]


class Scheduled(Protocol):
    """vllm.v1.core.sched.output.SchedulerOutput."""

    scheduled_new_reqs: list[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]
    num_spec_tokens_to_schedule: int


class Sampled(Protocol):
    """vllm.v1.outputs.ModelRunnerOutput."""

    sampled_token_ids: list[list[int]]
    req_id_to_index: dict[str, int]


@dataclass(slots=True)
class PendingStep:
    """A step that was scheduled. choice: the one that led to the drafts that it verifies; drafting: to its own.

    prompts: rows that compute prompt tokens, which are not among the num_decoding. num_next: rows that decode after it.
    """

    scheduled: Scheduled
    started: float
    choice: ArmChoice
    drafting: ArmChoice
    prompts: Set[str]
    num_decoding: int
    num_next: int
    longest_draft: int
    num_drafted_sequences: int
    num_drafts: int
    mean_context_length: float


class StepTracker:
    """Follows the steps of one scheduler from schedule() to update_from_output().

    ragged: the method proposes what it finds (n-grams), so rows with shorter drafts are ordinary: their runs count at the
    length that was asked for, which is what is chosen. Otherwise such steps mix lengths. overlapped: steps are scheduled
    before the one ahead of them has ended.
    """

    def __init__(self, ragged: bool, overlapped: bool, first: ArmChoice) -> None:
        self.ragged = ragged
        self.overlapped = overlapped
        self.num_odd = 0  # steps whose rows do not add up: not reported
        self._drafting = first
        self._pending: deque[PendingStep] = deque(maxlen=MAX_PENDING)
        self._prefilling: Set[str] = NOBODY
        self._seen: set[tuple[int, int, int]] = set()
        self._ended = 0.0
        self._busy = False

    def scheduled(self, output: Scheduled, requests: Mapping[str, Request], started: float) -> PendingStep | None:
        """A step that was scheduled, before vLLM counts its tokens as computed; None for one without any."""
        tokens = output.num_scheduled_tokens
        if not tokens:
            return None
        cached = output.scheduled_cached_reqs
        prompts, unfinished = NOBODY, NOBODY
        if output.scheduled_new_reqs or cached.resumed_req_ids or self._prefilling:
            prompts, unfinished = self._in_prompts(output, requests)
        drafts = list(map(len, output.scheduled_spec_decode_tokens.values()))
        contexts = cached.num_computed_tokens
        step = PendingStep(
            scheduled=output,
            started=started,
            choice=self._drafting,
            drafting=self._drafting,
            prompts=prompts,
            num_decoding=len(tokens) - len(prompts),
            num_next=len(tokens) - len(unfinished),
            longest_draft=max(drafts, default=0),
            num_drafted_sequences=len(drafts) - drafts.count(0),
            num_drafts=sum(drafts),
            mean_context_length=sum(contexts) / len(contexts) if contexts else 0.0,
        )
        self._pending.append(step)
        return step

    def _in_prompts(self, output: Scheduled, requests: Mapping[str, Request]) -> tuple[Set[str], Set[str]]:
        """Rows of a step that compute prompt tokens, and those of them that have more to compute after it."""
        tokens = output.num_scheduled_tokens
        prompts = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        prompts |= self._prefilling & tokens.keys()
        unfinished = {name for name in prompts if is_unfinished(requests[name], tokens[name])}
        self._prefilling = unfinished | {name for name in self._prefilling - tokens.keys() if name in requests}
        return prompts, unfinished

    def drafts(self, step: PendingStep, choice: ArmChoice) -> None:
        """The step drafts at this choice."""
        step.drafting = self._drafting = choice

    def finished(self, output: Scheduled, sampled: Sampled, ended: float, busy: bool) -> StepRecord | None:
        """The record of a step after vLLM has taken its tokens, and cut off what lies behind the end of a request.

        busy: whether requests go on. None for a step in which no row decoded.
        """
        step = self._take(output)
        began = self._began(step)
        self._ended, self._busy = ended, busy
        if step is None or not step.num_decoding or not sampled.sampled_token_ids:
            return None
        length = step.longest_draft
        if self.ragged:
            length = max(length, step.choice.arm.speculation_length)
        histogram = accepted_histogram(sampled, step.prompts, length)
        if histogram is None or sum(histogram) != step.num_decoding:
            self.num_odd += 1
            return None
        return StepRecord(
            seq=0,
            batch_size=step.num_decoding,
            arm=Arm(length),
            latency_s=ended - began,
            accepted_histogram=histogram,
            mean_context_length=step.mean_context_length,
            decision_version=step.choice.decision_version,
            flags=self._flags(step, length),
            probe_id=step.choice.probe_id,
            num_drafted_sequences=step.num_drafted_sequences,
            num_verified_tokens=step.num_decoding + step.num_drafts,
            num_new_sequences=len(output.scheduled_new_reqs),
        )

    def _take(self, output: Scheduled) -> PendingStep | None:
        """The pending step of an output. Those before it never ended: vLLM gave them up."""
        for position, step in enumerate(self._pending):
            if step.scheduled is output:
                for _ in range(position + 1):
                    self._pending.popleft()
                return step
        return None  # a step without tokens: nothing to do with those under way

    def _began(self, step: PendingStep | None) -> float:
        """When a step's time begins: where the one before ended, unless vLLM waited for requests in between."""
        started = self._ended if step is None else step.started
        if self.overlapped:
            return max(started, self._ended)
        return self._ended if self._busy else started

    def _flags(self, step: PendingStep, length: int) -> frozenset[StepFlag]:
        flags = []
        if step.prompts:
            flags.append(StepFlag.PREFILL)
        if not self.ragged and step.num_drafts != length * step.num_decoding:
            flags.append(StepFlag.MIXED_LENGTHS)
        if step.drafting.arm.speculation_length != length:
            flags.append(StepFlag.CHANGED_ARM)
        shape = (step.num_decoding, length, step.drafting.arm.speculation_length)
        if shape not in self._seen:
            self._seen.add(shape)
            flags.append(StepFlag.FIRST_USE)
        return frozenset(flags) if flags else ORDINARY


def is_unfinished(request: Request, num_tokens: int) -> bool:
    """Whether a row is still in its prompt after a step that computes num_tokens of it."""
    return request.num_computed_tokens + num_tokens < request.num_tokens + request.num_output_placeholders


def accepted_histogram(sampled: Sampled, prompts: Set[str], length: int) -> tuple[int, ...] | None:
    """Rows by accepted run, 0 to length, without those that were in their prompts; None where a run is longer.

    Rows of requests that ended while the step was under way count like others: they were computed like others.
    """
    rows = sampled.sampled_token_ids
    if prompts:
        rows = [rows[index] for name, index in sampled.req_id_to_index.items() if name not in prompts]
    histogram = [0] * (length + 1)
    for row in rows:
        run = len(row) - 1 if row else 0  # the last token is the target's own
        if run > length:
            return None
        histogram[run] += 1
    return tuple(histogram)
