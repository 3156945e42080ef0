"""Runs the models for one plan after the other. Knows nothing of queues and callers, and moves no row. One thread.

Prompts go through the target in the pass that verifies the drafts of the rows that decode: a pass of twice the tokens
takes less than twice the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from speclen.records import PLAIN, StepFlag
from speclen.worker.backends.passes import PassModel, PassPart, prompt_part
from speclen.worker.engine.launched import Decided, LaunchedStep
from speclen.worker.engine.ragged_step import make_ragged_batch, ragged_step
from speclen.worker.engine.speculative import StepOutcome, host_models, host_step, speculative_step
from speclen.worker.engine.step_plan import PromptChunk, StepPlan, StepTokens, make_batch
from speclen.worker.models.upload import upload
from speclen.worker.requests.request import TokenLogprobs
from speclen.worker.requests.sequence import SequenceState
from speclen.worker.sampling.host import HostRule
from speclen.worker.sampling.rules import BatchSampling, GreedyRule, SamplingRule, TokenRule

# A draft that lacks no more tokens than this catches up inside the first pass of the step, all rows at once.
CATCH_UP_WIDTH = 16
# The same with n-grams, after which the draft lacks what was accepted of them: such steps catch up all the time.
RAGGED_CATCH_UP_WIDTH = 64


class StepRunner:
    """draft: None when nothing can be drafted. prefill_chunk: tokens that the draft catches up with in one pass."""

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
        self._feeds_draft = draft is not None  # True if it was to, as new rows will then be: their drafts must be ready
        self._last = 0, PLAIN  # rows of the last step, and its arm
        self._seen_shapes: set[tuple[int, int]] = set()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step of the plan's rows, and feed its prompts.

        This or `read` may fail, and the step be launched again, with any part of the plan: of the sequences nothing has
        changed then but how much of them the draft holds.
        """
        step, prompts = LaunchedStep(plan), self._prompt_parts(plan.chunks)
        prompt_logits = self._decode(step, prompts) if plan.rows else self.target.forward(prompts)
        fed = zip(plan.chunks, prompt_logits, strict=True)
        completed = [(chunk.sequence, logits) for chunk, logits in fed if chunk.completes_prompt]
        for sequence, logits in completed:
            if sequence.shared is not None:
                sequence.shared.logits = logits.clone()  # The rest of the pass need not be kept.
        if completed:
            step.decided.append(self._first_tokens(completed))
        return step

    def read(self, step: LaunchedStep) -> StepTokens:
        """The tokens of the step launched last, as soon as the device has them."""
        self._note_held(step.plan, tokens := step.read())
        return tokens

    def feed_draft_prompts(self, chunks: Sequence[PromptChunk], meanwhile: Callable[[], None]) -> float:
        """Feed the draft the prompts that the target was fed in this step; seconds that took.

        Apart from `launch`, since nobody's tokens have to wait for it. meanwhile: called while the device is at it. Where
        it fails, the draft catches up when it is asked.
        """
        ends = [(chunk.sequence, chunk.end) for chunk in chunks if self._draft_goes_along(chunk)]
        return self._timed(lambda: self._feed_up_to(ends), meanwhile) if ends else 0.0

    def copy_prompt(
        self, sequence: SequenceState, source: SequenceState | None
    ) -> tuple[list[int], list[TokenLogprobs] | None]:
        """Give a sequence what `source` holds of the prompt they share; the token that follows it, as in StepTokens.

        source: None where that token is its last one, which needs no more than the logits after the prompt.
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

    def _note_held(self, plan: StepPlan, tokens: StepTokens) -> None:
        """Move on how much of the sequences the models hold: all but the pending token, which is the last new one."""
        length, is_ragged = plan.draft_length, self._is_ragged(plan)
        for at, row in enumerate(plan.rows):
            num_fed, num_new = len(row.tokens) - 1, len(tokens.ids[at] or ())
            row.target_length = num_fed + num_new
            if is_ragged and plan.draft_lengths[at]:
                row.draft_length = num_fed + min(num_new, plan.draft_lengths[at])
            elif not is_ragged and length and at < plan.num_drafting:
                row.draft_length = num_fed + min(num_new, length)
        for chunk in plan.chunks:
            chunk.sequence.target_length = chunk.end

    # Decoding.

    def _decode(self, step: LaunchedStep, prompts: Sequence[PassPart]) -> list[torch.Tensor]:
        """One step of the rows, with its flags; returns the logits [1, 1, vocab] after each of the prompts."""
        plan, flags = step.plan, step.flags
        num_first_uses, speculated = self._num_first_uses(), self._speculating
        self._feeds_draft = plan.choice.arm.speculation_length > 0
        self._speculating = self._feeds_draft or plan.draft_length > 0
        if self._speculating and not speculated:
            for row in plan.rows:
                row.draft_due = len(row.tokens) - 1
        prompt_logits: list[torch.Tensor] = []
        ragged = self._is_ragged(plan)
        rule = self._step_rule(plan, ragged)
        if not (prompts or ragged) and isinstance(rule, HostRule) and self._fits_host(plan):
            decided = Decided(plan.rows, *self._host_step(plan, flags, rule))
        else:
            take = self._ragged_step if ragged else self._even_step
            num_accepted, ids, logits, prompt_logits = take(plan, prompts, flags, rule)
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
        """True if only another arm made this pass another one than the last, and that is why it took longer.

        Where rows have come or gone a step takes longer under any arm: that is a part of step times.
        """
        arm = plan.proposals.arm
        (num_rows, before), self._last = self._last, (len(plan.rows), arm)
        return self.target.slow_changes and num_rows == len(plan.rows) and arm != before

    def _is_ragged(self, plan: StepPlan) -> bool:
        """True if rows propose different numbers of tokens, and that is worth a step of its own kind."""
        return plan.has_ngrams or (self.target.ragged and not plan.is_even)

    def _fits_host(self, plan: StepPlan) -> bool:
        """True if `host_step` does what the plan says, which is not ragged."""
        even = self._hosts is not None and plan.is_even
        return even and all(row.request.sampling.logprobs is None for row in plan.rows)

    def _host_step(self, plan: StepPlan, flags: set[StepFlag], rule: HostRule) -> tuple[np.ndarray, np.ndarray]:
        """StepOutcome's num_accepted and tokens."""
        assert self._hosts is not None
        width = self._catch_up(plan, flags) if plan.draft_length else 1
        num_tokens = np.array([len(row.tokens) for row in plan.rows])
        recent_ids = np.array([row.tokens[-width:] for row in plan.rows])
        return host_step(*self._hosts, num_tokens, recent_ids, plan.draft_length, rule)

    def _even_step(
        self, plan: StepPlan, prompts: Sequence[PassPart], flags: set[StepFlag], rule: TokenRule
    ) -> StepOutcome:
        """A step whose rows all propose the same number of tokens, or are treated as if."""
        length = plan.draft_length
        width = self._catch_up(plan, flags) if length else 1
        batch = make_batch(plan, width, self._device)
        return speculative_step(self.target, self.draft, batch, length, rule, prompts)

    def _ragged_step(
        self, plan: StepPlan, prompts: Sequence[PassPart], flags: set[StepFlag], rule: TokenRule
    ) -> StepOutcome:
        """A step whose rows propose different numbers of tokens."""
        drafting = [row for row, length in zip(plan.rows, plan.draft_lengths, strict=True) if length]
        behind = [len(row.tokens) - 1 - row.draft_length for row in drafting]
        if behind and (sum(behind) > self._prefill_chunk or max(behind) > RAGGED_CATCH_UP_WIDTH):
            self._flag_catch_up(plan, drafting, flags)
            self._feed_missing(drafting)
        return ragged_step(self.target, self.draft, make_ragged_batch(plan), rule, prompts)

    def _num_first_uses(self) -> int:
        return self.target.num_first_uses + (self.draft.num_first_uses if self.draft is not None else 0)

    def _catch_up(self, plan: StepPlan, flags: set[StepFlag]) -> int:
        """Recent tokens that the draft's first pass must be fed; flagged when the draft had fallen behind.

        It lacks one token after a step that accepted everything; more after steps without it, or with n-grams.
        """
        drafting = plan.rows[: plan.num_drafting]
        behind = max(len(row.tokens) - 1 - row.draft_length for row in drafting)
        if behind <= 1:
            return 1 + behind
        self._flag_catch_up(plan, drafting, flags)
        if behind < CATCH_UP_WIDTH and min(len(row.tokens) for row in plan.rows) > behind:
            return 1 + behind
        self._feed_missing(drafting)
        return 1

    def _flag_catch_up(self, plan: StepPlan, drafting: Sequence[SequenceState], flags: set[StepFlag]) -> None:
        """With n-grams, catching up with accepted ones is a part of what such an arm takes.

        Not so with prompts, nor with output from before such an arm: a row may have n-gram matches for some steps before
        it drafts for the first time.
        """
        if not plan.choice.arm.ngram or any(row.draft_length + 1 < row.draft_due for row in drafting):
            flags.add(StepFlag.CATCH_UP)

    def _feed_missing(self, drafting: Sequence[SequenceState]) -> None:
        """Give the draft all that it lacks but the pending tokens."""
        self._feed_up_to([(sequence, len(sequence.tokens) - 1) for sequence in drafting])

    def _feed_up_to(self, ends: Sequence[tuple[SequenceState, int]]) -> None:
        """Give the draft what it lacks of each sequence's first so many tokens, at most `prefill_chunk` tokens in a pass."""
        chunks: list[PromptChunk] = []
        room = self._prefill_chunk
        for sequence, end in ends:
            at = sequence.draft_length
            while at < end:
                chunks.append(PromptChunk(sequence, at, sequence.tokens[at : min(end, at + room)]))
                at = chunks[-1].end
                room -= len(chunks[-1].ids)
                if not room:
                    self._feed_draft(chunks)
                    chunks, room = [], self._prefill_chunk
        self._feed_draft(chunks)

    def _prompt_parts(self, chunks: Sequence[PromptChunk]) -> list[PassPart]:
        return [prompt_part(chunk.sequence.row, chunk.ids, chunk.start, self._device) for chunk in chunks]

    def _timed(self, work: Callable[[], None], meanwhile: Callable[[], None]) -> float:
        """Seconds that the device is at some work, having done all that it was given before."""
        if self._device.type != "cuda":
            started = time.perf_counter()
            work()
            took_s = time.perf_counter() - started
            meanwhile()
            return took_s
        stream = torch.cuda.current_stream(self._device)
        start = stream.record_event(torch.cuda.Event(enable_timing=True))
        work()
        end = stream.record_event(torch.cuda.Event(enable_timing=True))
        meanwhile()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _feed_draft(self, chunks: Sequence[PromptChunk]) -> None:
        if not chunks:
            return
        assert self.draft is not None
        self.draft.forward(self._prompt_parts(chunks))
        for chunk in chunks:
            chunk.sequence.draft_length = chunk.end

    def _draft_goes_along(self, chunk: PromptChunk) -> bool:
        """True if the draft prefills this chunk as well, since it will be asked for tokens next."""
        sequence = chunk.sequence
        # Without ragged batches, one sequence with a fixed length makes the others draft, too.
        others = self._feeds_draft or (self._speculating and not self.target.ragged)
        wanted = others if sequence.fixed_length is None else sequence.fixed_length > 0
        may = sequence.may_draft and not sequence.finished
        # The draft may hold fewer tokens than the target: after n-gram tokens, or steps without a draft. It catches up here.
        return wanted and may and sequence.draft_length < chunk.end

    def _first_tokens(self, completed: Sequence[tuple[SequenceState, torch.Tensor]]) -> Decided:
        """Choose the tokens that follow the sequences' prompts, by the logits [1, 1, vocab] after each."""
        sequences, logits = [one for one, _ in completed], torch.cat([logits for _, logits in completed])
        rule = self._rule(BatchSampling([one.sampling for one in sequences], self._device), sequences)
        nothing_drafted = torch.zeros((len(sequences), 0), dtype=torch.long, device=self._device)
        return Decided(sequences, *rule.decide(logits, nothing_drafted, None), logits)

    # Choosing.

    def _step_rule(self, plan: StepPlan, ragged: bool) -> TokenRule:
        """Make the sampling rule of the plan's rows, anew for every try of a step: a rule keeps what was drafted."""
        if plan.rows != self._sampled_rows:
            self._sampling = BatchSampling([row.sampling for row in plan.rows], self._device)
            self._sampled_rows = plan.rows
        return self._rule(self._sampling, plan.rows, np.array(plan.num_ngrams) if ragged else None)

    def _rule(
        self, sampling: BatchSampling, rows: Sequence[SequenceState], num_ngrams: np.ndarray | None = None
    ) -> TokenRule:
        positions = [row.num_output_tokens for row in rows]
        if sampling.on_host:
            return HostRule(sampling.for_host, positions, self._generator, num_ngrams)
        if sampling.is_plain_greedy:
            return GreedyRule(sampling.grammars())
        on_device = None if num_ngrams is None else upload(num_ngrams, self._device)
        return SamplingRule(sampling, upload(np.array(positions), self._device), self._generator, on_device)
