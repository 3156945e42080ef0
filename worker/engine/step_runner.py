"""Runs the models for one plan after another. Knows nothing of queues and callers, and moves no row.

The target prefills in the same forward pass that verifies drafts, since a pass of twice the tokens takes less than twice
the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from speclen.records import PLAIN, StepFlag
from speclen.worker.backends.passes import PassModel, PassPart, prompt_part
from speclen.worker.engine.speculative import (
    Decided,
    LaunchedStep,
    host_models,
    host_step,
    ragged_step,
    speculative_step,
)
from speclen.worker.engine.step_plan import PromptChunk, StepPlan
from speclen.worker.models.devices import upload
from speclen.worker.requests.request import TokenLogprobs
from speclen.worker.requests.sequence import SequenceState
from speclen.worker.sampling.host import HostRule
from speclen.worker.sampling.rules import BatchSampling, SamplingRule, TokenRule

# A draft model that lacks no more tokens than this catches up in the first forward pass of the step.
CATCH_UP_WIDTH = 16
# The same for ragged steps: with n-grams the draft model lacks the accepted n-gram tokens in each of them.
RAGGED_CATCH_UP_WIDTH = 64
SLOW_STEPS = 4  # steps after a change of the arm that take longer if changes are slow: 46, 44, 43, 41 ms, then 36


class StepRunner:
    """Launches and reads steps. prefill_chunk: tokens that the draft model catches up on in one forward pass."""

    def __init__(
        self, target: PassModel, draft: PassModel | None, prefill_chunk: int, generator: torch.Generator
    ) -> None:
        self.target = target
        self.draft = draft
        self._prefill_chunk = prefill_chunk
        self._generator = generator
        self._device = target.device
        self._hosts = host_models(target, draft)
        self._sampled_rows: list[SequenceState] = []
        self._sampling = BatchSampling([], self._device)  # of _sampled_rows
        self._speculating = draft is not None  # True if the last step drafted
        self._arm_drafts = (
            draft is not None
        )  # True if the last arm drafts: then the draft model prefills new prompts, too
        self._last = 0, PLAIN  # rows of the last step, and its arm
        self._slow_steps = 0  # coming steps that take longer because the arm has changed
        self._seen_shapes: set[tuple[int, int]] = set()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step: decode the plan's rows, and prefill its chunks.

        If this or `read` fails, any part of the plan can be launched again: only the rows' draft lengths have changed.
        """
        step, prompts = LaunchedStep(plan, plan.flags), self._prompt_parts(plan.chunks)
        prompt_logits = self._decode(step, prompts) if plan.rows else self.target.forward(prompts)
        both = zip(plan.chunks, prompt_logits, strict=True)
        completed = [(chunk.sequence, logits) for chunk, logits in both if chunk.completes_prompt]
        for sequence, logits in completed:
            if sequence.shared is not None:
                sequence.shared.logits = logits.clone()  # a copy, so that the pass's memory can be reused
        if completed:
            step.decided.append(self._first_tokens(completed))
        return step

    def read(self, step: LaunchedStep) -> None:
        """Read the results of the last launched step, and update the rows' lengths. Waits for the device."""
        step.read()
        plan, is_ragged = step.plan, self._is_ragged(step.plan)
        for at, (row, length) in enumerate(zip(plan.rows, plan.draft_lengths, strict=True)):
            # All tokens are held but the last new one, which is pending.
            num_held, num_new = len(row.tokens) - 1, len(step.ids[at] or ())
            row.target_length = num_held + num_new
            if length:
                row.draft_length = num_held + min(num_new, length if is_ragged else plan.draft_length)
        for chunk in plan.chunks:
            chunk.sequence.target_length = chunk.end

    def prefill_draft(self, chunks: Sequence[PromptChunk], meanwhile: Callable[[], None]) -> float:
        """Prefill the draft model with the step's prompts, and return the seconds that took.

        Separate from `launch`, so that no tokens wait for it. meanwhile: called while the device works. After a failure the
        draft model catches up on its next use.
        """
        ends = [(chunk.sequence, chunk.end) for chunk in chunks if self._draft_prefills(chunk)]
        if not ends:
            return 0.0
        if self._device.type != "cuda":
            started = time.perf_counter()
            self._prefill_up_to(ends)
            took_s = time.perf_counter() - started
            meanwhile()
            return took_s
        # The time on the device, without that of earlier work.
        stream = torch.cuda.current_stream(self._device)
        start = stream.record_event(torch.cuda.Event(enable_timing=True))
        self._prefill_up_to(ends)
        end = stream.record_event(torch.cuda.Event(enable_timing=True))
        meanwhile()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def copy_prompt(
        self, sequence: SequenceState, source: SequenceState | None
    ) -> tuple[list[int], list[TokenLogprobs] | None]:
        """Copy the shared prompt from `source`. Returns the token after it, and that token's log probabilities.

        source: None if that token is the last one, which needs only the logits after the prompt.
        """
        assert sequence.shared is not None
        assert sequence.shared.logits is not None
        if source is not None:
            length = sequence.num_prompt_tokens
            self.target.pool.copy(source.row, sequence.row, length)
            sequence.target_length = length
            if self.draft is not None and source.draft_length >= length:
                self.draft.pool.copy(source.row, sequence.row, length)
                sequence.draft_length = length
        ((ids,), (logprobs,)) = self._first_tokens([(sequence, sequence.shared.logits)]).read()
        return ids, logprobs

    # Decoding.

    def _decode(self, step: LaunchedStep, prompts: Sequence[PassPart]) -> list[torch.Tensor]:
        """Launch the step of the rows, and set its flags. Returns the logits [1, 1, vocab] after each prompt."""
        plan, flags = step.plan, step.flags
        num_first_uses, speculated = self._num_first_uses(), self._speculating
        self._arm_drafts = plan.choice.arm.speculation_length > 0
        self._speculating = self._arm_drafts or plan.draft_length > 0
        if self._speculating and not speculated:
            for row in plan.rows:
                row.draft_due = len(row.tokens) - 1
        rule, ragged, width = self._step_rule(plan), self._is_ragged(plan), 1
        if ragged:
            self._catch_up_ragged(plan, flags)
        elif plan.draft_length:
            width = self._catch_up(plan, flags)
        prompt_logits: list[torch.Tensor] = []
        wants_logits = prompts or any(row.request.sampling.logprobs is not None for row in plan.rows)
        if self._hosts is not None and isinstance(rule, HostRule) and not (ragged or wants_logits):
            decided = Decided(plan.rows, *host_step(*self._hosts, plan, width, rule))
        else:
            found = (
                ragged_step(self.target, self.draft, plan, rule, prompts)
                if ragged
                else speculative_step(self.target, self.draft, plan, width, rule, prompts)
            )
            num_accepted, ids, logits, prompt_logits = found
            decided = Decided(plan.rows, num_accepted, ids, logits)
        step.decided.append(decided)
        if self._changes_arm(plan):
            flags.add(StepFlag.CHANGED_ARM)
        shape = (len(plan.rows), decided.ids.shape[1])
        if shape not in self._seen_shapes:
            flags.add(StepFlag.FIRST_USE)
        self._seen_shapes.add(shape)
        if self._num_first_uses() != num_first_uses:
            flags.add(StepFlag.COMPILATION)
        return prompt_logits

    def _changes_arm(self, plan: StepPlan) -> bool:
        """True if the step takes longer because only the arm changed, in this step or in one of the SLOW_STEPS before.

        A step after a change of the number of rows takes longer under any arm, so that is a part of step times.
        """
        arm = plan.proposals.arm
        (num_rows, before), self._last = self._last, (len(plan.rows), arm)
        if arm != before:
            self._slow_steps = SLOW_STEPS if num_rows == len(plan.rows) else 0
        self._slow_steps -= 1
        return self.target.slow_changes and self._slow_steps >= 0

    def _is_ragged(self, plan: StepPlan) -> bool:
        """True if rows propose different numbers of tokens, and the models need no padding for that."""
        return self.target.ragged and (plan.has_ngrams or not plan.is_even)

    def _num_first_uses(self) -> int:
        return self.target.num_first_uses + (self.draft.num_first_uses if self.draft is not None else 0)

    def _catch_up(self, plan: StepPlan, flags: set[StepFlag]) -> int:
        """Number of last tokens that the draft model processes in its first pass. Flags the step if it is behind.

        The draft model lacks one token after a fully accepted draft, and more after steps without drafts or with n-grams.
        """
        drafting = plan.drafting
        behind = max(len(row.tokens) - 1 - row.draft_length for row in drafting)
        if behind <= 1:
            return 1 + behind
        self._flag_catch_up(plan, drafting, flags)
        if behind < CATCH_UP_WIDTH and min(len(row.tokens) for row in plan.rows) > behind:
            return 1 + behind
        self._prefill_missing(drafting)
        return 1

    def _catch_up_ragged(self, plan: StepPlan, flags: set[StepFlag]) -> None:
        """Let the draft model catch up if it lacks too many tokens for the first pass of the step."""
        drafting = plan.drafting
        behind = [len(row.tokens) - 1 - row.draft_length for row in drafting]
        if behind and (sum(behind) > self._prefill_chunk or max(behind) > RAGGED_CATCH_UP_WIDTH):
            self._flag_catch_up(plan, drafting, flags)
            self._prefill_missing(drafting)

    def _flag_catch_up(self, plan: StepPlan, drafting: Sequence[SequenceState], flags: set[StepFlag]) -> None:
        """Flag a step in which the draft model catches up, unless that is a part of the arm's cost.

        Catching up on accepted n-gram tokens is a part of the cost of an arm with both. Catching up on a prompt, or on
        output from before the arm, is not: a row may have n-gram matches for some steps before it drafts for the first time.
        """
        if not plan.choice.arm.ngram or any(row.draft_length + 1 < row.draft_due for row in drafting):
            flags.add(StepFlag.CATCH_UP)

    def _prefill_missing(self, drafting: Sequence[SequenceState]) -> None:
        """Let the draft model catch up to the pending tokens."""
        self._prefill_up_to([(sequence, len(sequence.tokens) - 1) for sequence in drafting])

    def _prefill_up_to(self, ends: Sequence[tuple[SequenceState, int]]) -> None:
        """Bring the draft model to each sequence's first `end` tokens, in passes of at most `prefill_chunk` tokens."""
        chunks: list[PromptChunk] = []
        room = self._prefill_chunk
        for sequence, end in ends:
            at = sequence.draft_length
            while at < end:
                chunks.append(PromptChunk(sequence, at, sequence.tokens[at : min(end, at + room)]))
                at = chunks[-1].end
                room -= len(chunks[-1].ids)
                if not room:
                    self._prefill_chunks(chunks)
                    chunks, room = [], self._prefill_chunk
        self._prefill_chunks(chunks)

    def _prompt_parts(self, chunks: Sequence[PromptChunk]) -> list[PassPart]:
        return [prompt_part(chunk.sequence.row, chunk.ids, chunk.start, self._device) for chunk in chunks]

    def _prefill_chunks(self, chunks: Sequence[PromptChunk]) -> None:
        if not chunks:
            return
        assert self.draft is not None
        self.draft.forward(self._prompt_parts(chunks))
        for chunk in chunks:
            chunk.sequence.draft_length = chunk.end

    def _draft_prefills(self, chunk: PromptChunk) -> bool:
        """True if the draft model prefills this chunk as well, since it will draft for the sequence."""
        sequence = chunk.sequence
        # Without ragged batches, one sequence with a fixed length makes the others draft, too.
        others = self._arm_drafts or (self._speculating and not self.target.ragged)
        wanted = others if sequence.fixed_length is None else sequence.fixed_length > 0
        may = sequence.may_draft and not sequence.finished
        # After n-gram tokens or steps without drafts the draft model is behind the target, and catches up here.
        return wanted and may and sequence.draft_length < chunk.end

    def _first_tokens(self, completed: Sequence[tuple[SequenceState, torch.Tensor]]) -> Decided:
        """Choose the first output token of each sequence from the logits [1, 1, vocab] after its prompt."""
        sequences, logits = [one for one, _ in completed], torch.cat([logits for _, logits in completed])
        rule = self._rule(BatchSampling([one.sampling for one in sequences], self._device), sequences)
        nothing_drafted = torch.zeros((len(sequences), 0), dtype=torch.long, device=self._device)
        return Decided(sequences, *rule.decide(logits, nothing_drafted, None), logits)

    # Choosing.

    def _step_rule(self, plan: StepPlan) -> TokenRule:
        """The rule by which the plan's rows choose tokens. Every attempt needs a new one, which keeps its drafts."""
        if plan.rows != self._sampled_rows:
            self._sampling = BatchSampling([row.sampling for row in plan.rows], self._device)
            self._sampled_rows = plan.rows
        return self._rule(self._sampling, plan.rows, np.array(plan.num_ngrams) if plan.has_ngrams else None)

    def _rule(
        self, sampling: BatchSampling, rows: Sequence[SequenceState], num_ngrams: np.ndarray | None = None
    ) -> TokenRule:
        positions = [row.num_output_tokens for row in rows]
        if sampling.on_host:
            return HostRule(sampling.for_host, positions, self._generator, num_ngrams)
        on_device = None if num_ngrams is None else upload(num_ngrams, self._device)
        return SamplingRule(sampling, upload(np.array(positions), self._device), self._generator, on_device)
