"""Execution of one step's plan: its tokens, its rows and its record."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from speclen.records import PLAIN, OutputEvaluation, StepRecord
from speclen.worker.backends.torch.recording import is_out_of_memory
from speclen.worker.engine.outbox import Outbox
from speclen.worker.engine.scheduler import Scheduler
from speclen.worker.engine.speculative import LaunchedStep
from speclen.worker.engine.step_plan import PromptChunk, StepPlan
from speclen.worker.engine.step_runner import StepRunner
from speclen.worker.evaluation.evaluator import Evaluator
from speclen.worker.requests.request import TokenLogprobs
from speclen.worker.requests.sequence import SequenceState

log = logging.getLogger(__name__)

# Plain steps after one whose proposals failed, else every step might run twice; and after one without memory, which some
# other request may soon give back.
PLAIN_STEPS, PLAIN_STEPS_WITHOUT_MEMORY = 256, 16


class StepExecutor:
    """num_plain_steps: coming steps that are plain, whatever arm is selected."""

    def __init__(self, runner: StepRunner, outbox: Outbox, scheduler: Scheduler, evaluator: Evaluator) -> None:
        self.num_plain_steps = 0
        self._runner, self._outbox, self._scheduler = runner, outbox, scheduler
        self._evaluator = evaluator
        self._draft_prefill_s = 0.0  # since the last record

    def run(self, plan: StepPlan, started: float, evaluates: bool = False) -> StepRecord | None:
        """Run a plan, hand out its tokens and settle the rows; None when no row decoded.

        A plan that fails is run again in parts: decoding rows, then each prompt, then without proposals. A part that fails
        ends its requests, not the engine. Every try makes its rules and its batch anew, with a time of its own.
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
            log.exception("%s failed together; they run apart", failed)
            first, *_ = [self.run(part, time.perf_counter()) for part in parts]
            return first
        if plan.rows and (plan.choice.arm, plan.proposals.arm) != (PLAIN, PLAIN):
            self.num_plain_steps = PLAIN_STEPS_WITHOUT_MEMORY if is_out_of_memory(error) else PLAIN_STEPS
            log.exception("proposals for %s failed; %d steps go on without", failed, self.num_plain_steps)
            self.run(plan.plainly(), time.perf_counter())
            return None  # the time of two steps
        log.exception("a step of %s failed; their requests end", failed)
        self.end(plan.sequences, error)
        return None

    def _commit(self, step: LaunchedStep, started: float, evaluates: bool) -> StepRecord | None:
        """Hand out the tokens of a step that was read, and settle the rows."""
        plan = step.plan
        context = sum(len(row.tokens) for row in plan.rows) / max(1, len(plan.rows))
        self._outbox.count_step(plan.rows, plan.draft_lengths, plan.num_ngrams)
        new = zip(plan.sequences, step.ids, step.logprobs, strict=True)
        accepted = [self._hand_out(sequence, ids, logprobs) for sequence, ids, logprobs in new if ids is not None]
        if self._outbox.holds_back and not self._launches_next():
            self._outbox.deliver()
        self._feed_draft(plan.chunks)
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
        """accepted: accepted tokens by row. latency_s: of the step without evaluations."""
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
        """True if a step follows that launches its passes without waiting, as no step with a grammar does."""
        rows = [row for row in self._scheduler.rows if not row.finished]
        return bool(rows or self._scheduler.waiting) and all(row.sampling.grammar is None for row in rows)

    def _hand_out(self, sequence: SequenceState, ids: list[int], logprobs: list[TokenLogprobs] | None) -> int:
        """As Outbox.hand_out. A row without a token is tried again without proposals, which may be the cause."""
        if sequence.finished:  # its text could not be made meanwhile
            return 0
        if not ids and sequence.num_output_tokens and (sequence.may_draft or sequence.may_use_ngrams):
            log.warning("request %s goes on without proposals: its logits were NaN", sequence.request.request_id)
            sequence.go_on_plainly()
            self._runner.target.pool.clear_beyond(sequence.row, sequence.target_length)
            return 0
        return self._outbox.hand_out(sequence, ids, logprobs)

    def _feed_draft(self, chunks: Sequence[PromptChunk]) -> None:
        """Prefill the draft model with the step's prompts. Failures are harmless: it catches up on its next use."""
        try:
            self._draft_prefill_s += self._runner.feed_draft_prompts(chunks, self._outbox.deliver)
        except Exception:
            log.exception("draft-model prefill of %d prompts failed; it catches up on its next use", len(chunks))

    def end(self, sequences: Iterable[SequenceState], error: BaseException | None = None) -> None:
        """Abort sequences that have rows. error: None if a caller asked for it."""
        sequences = list(sequences)
        self._outbox.deliver()  # ends sequences whose text cannot be made
        self._outbox.abort([sequence for sequence in sequences if not sequence.finished], error)
        self._scheduler.settle(sequences)
