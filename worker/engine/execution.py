"""Execution of one step's plan: its tokens go to the callers, its slots are settled, and its record is made."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from speclen.records import PLAIN, OutputEvaluation, StepRecord
from speclen.worker.backends.torch.captured_model import is_out_of_memory
from speclen.worker.engine.evaluation import Evaluator
from speclen.worker.engine.scheduler import Scheduler
from speclen.worker.engine.speculative import LaunchedStep
from speclen.worker.engine.step_plan import PromptChunk, StepPlan
from speclen.worker.engine.step_runner import StepRunner
from speclen.worker.requests.request import EngineFailedError, SequenceOutput, TokenLogprobs
from speclen.worker.requests.sequence import NewTokens, SequenceState

log = logging.getLogger(__name__)

NO_TOKEN = "the model's logits are NaN or infinite, so no token can be chosen"
# Plain steps after a step that failed with proposals and may do so again; fewer if it ran out of memory, which another
# request may soon free.
PLAIN_STEPS, PLAIN_STEPS_WITHOUT_MEMORY = 256, 16


@dataclass(slots=True)
class Totals:
    """Counts since the start. Only tokens that went to callers count as generated or accepted.

    num_row_steps: decoding sequences, summed over steps. num_drafts: proposals, each of one sequence in one step.
    num_draft_tokens: tokens of all proposals, of which num_ngram_tokens are n-gram tokens. num_accepted_by_position[j]:
    proposals whose token at position j was accepted; they sum to num_accepted_tokens.
    """

    num_steps: int = 0
    num_row_steps: int = 0
    num_generated_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_ngram_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_position: list[int] = field(default_factory=list)


class Outbox:
    """Delivers new tokens to callers, and counts them. For the engine's thread.

    on_end: called with every sequence before its last output. max_proposed: largest number of proposed tokens per sequence
    and step. holds_back: True if outputs wait for `deliver`, which must be called before the sequence's next tokens; False
    if they are sent at once.
    """

    def __init__(self, on_end: Callable[[SequenceState], None], max_proposed: int, holds_back: bool) -> None:
        self.holds_back = holds_back
        self._held_back: deque[tuple[SequenceState, NewTokens, list[TokenLogprobs] | None]] = deque()
        self.totals = Totals(num_accepted_by_position=[0] * max_proposed)
        self._on_end = on_end

    def count_step(
        self, rows: Sequence[SequenceState], draft_lengths: Sequence[int], num_ngrams: Sequence[int]
    ) -> None:
        """Count a step. This comes before any delivery, so that ratios of counts are right when receivers read them."""
        self.totals.num_steps += bool(rows)
        self.totals.num_row_steps += len(rows)
        self.totals.num_draft_tokens += sum(draft_lengths) + sum(num_ngrams)
        self.totals.num_ngram_tokens += sum(num_ngrams)
        for row, drafted, ngrams in zip(rows, draft_lengths, num_ngrams, strict=True):
            row.num_steps += 1
            row.num_draft_tokens += drafted + ngrams
            self.totals.num_drafts += drafted + ngrams > 0

    def accept(self, sequence: SequenceState, ids: list[int], logprobs: list[TokenLogprobs] | None) -> int:
        """Append new tokens to a sequence and queue them for its caller. Returns how many accepted proposals it kept.

        Tokens beyond the end of the request do not count, since they are no reason for longer drafts. A sequence without new
        tokens, or with tokens that cannot be appended, ends.
        """
        if not ids:
            log.warning("request %s ends: %s", sequence.request.request_id, NO_TOKEN)
            self._send(sequence, sequence.abort(NO_TOKEN))
            return 0
        num_accepted = sequence.num_accepted_tokens
        try:
            new = sequence.append(ids)
        except Exception as error:
            log.exception("request %s ends: its tokens cannot be appended", sequence.request.request_id)
            self.abort([sequence], error)
            return 0
        num_accepted = sequence.num_accepted_tokens - num_accepted
        self.totals.num_generated_tokens += len(new.ids)
        self.totals.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.totals.num_accepted_by_position[position] += 1
        if self.holds_back:
            self._held_back.append((sequence, new, logprobs))
        else:
            self._emit(sequence, new, logprobs)
        return num_accepted

    def deliver(self) -> None:
        """Send the outputs held back. A sequence whose text cannot be decoded ends."""
        while self._held_back:
            self._emit(*self._held_back.popleft())

    def _emit(self, sequence: SequenceState, new: NewTokens, logprobs: list[TokenLogprobs] | None) -> None:
        try:
            output = sequence.output(new, logprobs)
        except Exception as error:
            log.exception("request %s ends: its tokens cannot be decoded", sequence.request.request_id)
            self.abort([sequence], error)
            return
        if output.error is not None:
            log.warning("request %s ends: %s", sequence.request.request_id, output.error)
        self._send(sequence, output)

    def abort(self, sequences: Iterable[SequenceState], error: BaseException | None = None) -> None:
        """End sequences where they are. error: None if the caller asked for it."""
        for sequence in sequences:
            self._send(sequence, sequence.abort(None if error is None else describe(error)))

    def _send(self, sequence: SequenceState, output: SequenceOutput) -> None:
        if output.finish_reason is not None:
            self._on_end(sequence)
        try:
            sequence.on_output(output)
        except Exception:
            log.exception("the callback of request %s failed", sequence.request.request_id)


def describe(error: BaseException) -> str:
    """The error in a sentence for callers."""
    if isinstance(error, EngineFailedError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class StepExecutor:
    """Runs plans of steps and recovers from failures. num_plain_steps: coming steps that are plain under any arm."""

    def __init__(self, runner: StepRunner, outbox: Outbox, scheduler: Scheduler, evaluator: Evaluator) -> None:
        self.num_plain_steps = 0
        self._runner, self._outbox, self._scheduler = runner, outbox, scheduler
        self._evaluator = evaluator
        self._draft_prefill_s = 0.0  # since the last record

    def run(self, plan: StepPlan, started: float, evaluates: bool = False) -> StepRecord | None:
        """Run a plan, queue its tokens for the callers, and settle its sequences. None if no sequence decoded.

        A plan that fails is run again in parts: the decoding sequences, then each prompt; then without proposals. A part
        that still fails ends its requests, not the engine. Every attempt builds its batch again and is timed separately.
        """
        try:
            step = self._runner.launch(plan)
            self._outbox.deliver()  # tokens of the step before, while the device runs this one
            self._runner.read(step)
        except Exception as error:
            return self._run_apart(plan, started, error)
        return self._commit(step, started, evaluates)

    def _run_apart(self, plan: StepPlan, started: float, error: Exception) -> StepRecord | None:
        failed = f"{len(plan.rows)} sequences and {len(plan.chunks)} prompts"
        if len(parts := plan.apart()) > 1:
            log.exception("%s failed together: they run separately", failed)
            first, *_ = [self.run(part, time.perf_counter()) for part in parts]
            return first
        if plan.rows and (plan.choice.arm, plan.proposals.arm) != (PLAIN, PLAIN):
            self.num_plain_steps = PLAIN_STEPS_WITHOUT_MEMORY if is_out_of_memory(error) else PLAIN_STEPS
            log.exception("a step of %s failed: the next %d steps propose nothing", failed, self.num_plain_steps)
            self.run(plan.plainly(), time.perf_counter())
            return None  # its time would be that of two steps
        log.exception("a step of %s failed: their requests end", failed)
        self.end(plan.sequences, error)
        return None

    def _commit(self, step: LaunchedStep, started: float, evaluates: bool) -> StepRecord | None:
        """Queue the tokens of a step that has been read, settle its sequences, and record it."""
        plan = step.plan
        context = sum(len(row.tokens) for row in plan.rows) / max(1, len(plan.rows))
        self._outbox.count_step(plan.rows, plan.draft_lengths, plan.num_ngrams)
        new = zip(plan.sequences, step.ids, step.logprobs, strict=True)
        accepted = [self._accept(sequence, ids, logprobs) for sequence, ids, logprobs in new if ids is not None]
        if self._outbox.holds_back and not self._launches_next():
            self._outbox.deliver()
        self._prefill_draft(plan.chunks)
        ended = time.perf_counter()
        deliver = self._outbox.deliver
        evaluations = self._evaluator.evaluate(plan.rows, ended - started, deliver) if evaluates else ()
        aside_s = time.perf_counter() - ended
        self._scheduler.settle([chunk.sequence for chunk in plan.chunks] + plan.rows)
        if not plan.rows:
            return None
        latency_s = time.perf_counter() - started - aside_s
        return self._record(step, accepted[: len(plan.rows)], context, latency_s, evaluations)

    def _record(
        self,
        step: LaunchedStep,
        accepted: list[int],
        mean_context_length: float,
        latency_s: float,
        evaluations: tuple[OutputEvaluation, ...],
    ) -> StepRecord:
        """The record of a step. accepted: accepted tokens of each sequence. latency_s: without evaluations."""
        plan, draft_prefill_s, self._draft_prefill_s = step.plan, self._draft_prefill_s, 0.0
        return StepRecord(
            seq=0,
            batch_size=len(plan.rows),
            arm=plan.proposals.arm,
            latency_s=latency_s,
            accepted_histogram=plan.histogram(accepted),
            mean_context_length=mean_context_length,
            decision_version=plan.choice.decision_version,
            flags=frozenset(step.flags),
            probe_id=plan.choice.probe_id,
            class_histograms=plan.class_histograms(accepted),
            num_drafted_sequences=len(plan.rows) - plan.draft_lengths.count(0),
            num_verified_tokens=plan.num_verified_tokens(self._runner.target.ragged),
            draft_prefill_s=draft_prefill_s,
            num_new_sequences=plan.num_new_sequences,
            evaluations=evaluations,
        )

    def _launches_next(self) -> bool:
        """True if another step follows and is launched without waiting for results. Steps with a grammar wait."""
        rows = [row for row in self._scheduler.rows if not row.finished]
        return bool(rows or self._scheduler.waiting) and all(row.sampling.grammar is None for row in rows)

    def _accept(self, sequence: SequenceState, ids: list[int], logprobs: list[TokenLogprobs] | None) -> int:
        """As Outbox.accept, but a sequence without a token is first tried without proposals, which may be the cause."""
        if sequence.finished:  # meanwhile, since its text could not be decoded
            return 0
        if not ids and sequence.num_output_tokens and (sequence.may_draft or sequence.may_use_ngrams):
            log.warning("request %s continues without proposals: its logits were NaN", sequence.request.request_id)
            sequence.disable_speculation()
            self._runner.target.pool.clear_beyond(sequence.row, sequence.target_length)
            return 0
        return self._outbox.accept(sequence, ids, logprobs)

    def _prefill_draft(self, chunks: Sequence[PromptChunk]) -> None:
        """Prefill the draft model with the step's prompts. Failures are harmless: it catches up on its next use."""
        try:
            self._draft_prefill_s += self._runner.prefill_draft(chunks, self._outbox.deliver)
        except Exception:
            log.exception("draft-model prefill of %d prompts failed: it catches up on its next use", len(chunks))

    def end(self, sequences: Iterable[SequenceState], error: BaseException | None = None) -> None:
        """Abort sequences that have slots. error: None if the caller asked for it."""
        sequences = list(sequences)
        self._outbox.deliver()  # ends sequences whose text cannot be decoded
        self._outbox.abort([sequence for sequence in sequences if not sequence.finished], error)
        self._scheduler.settle(sequences)
