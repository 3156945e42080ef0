"""Runs the models for the rows of a scheduler: takes decoding steps, and feeds prompts along with them. One thread.

Prompts go through the target in the pass that verifies the drafts of the rows that decode: a pass of twice the tokens
takes less than twice the time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from worker.backends.passes import PassModel, PassPart, prompt_part
from worker.logprobs import token_logprobs
from worker.request import SequenceOutput, TokenLogprobs
from worker.rules import BatchSampling, GreedyRule, SamplingRule, TokenRule
from worker.scheduler import Scheduler
from worker.sequence import Sequence
from worker.speculative import StepBatch, StepTokens, speculative_step
from worker.step_plan import PromptChunk, StepLengths, make_batch, plan_lengths, plan_prompts
from worker.steps import StepFlag

log = logging.getLogger(__name__)

# A draft that lacks no more tokens than this catches up inside the first pass of the step, all rows at once.
CATCH_UP_WIDTH = 16

Deliver = Callable[[Sequence, SequenceOutput], None]


@dataclass(slots=True)
class Totals:
    """Counts since the start. Generated and accepted tokens are those that went to callers."""

    num_steps: int = 0
    num_row_steps: int = 0  # decoding rows, summed over steps
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """speculation_length: length used. accepted_histogram[j]: rows to which the draft gave exactly j tokens.

    prompt_logits: [1, 1, vocab] each, after the prompts fed along; none when they made the step fail, which then went
    without them.
    """

    speculation_length: int
    accepted_histogram: tuple[int, ...]
    flags: frozenset[StepFlag]
    prompt_logits: list[torch.Tensor]


class StepRunner:
    """Moves the sequences of a scheduler on, and hands their new tokens to `deliver`.

    draft: None when nothing can be drafted.
    """

    def __init__(
        self,
        target: PassModel,
        draft: PassModel | None,
        scheduler: Scheduler,
        deliver: Deliver,
        prefill_chunk: int,
        generator: torch.Generator,
    ) -> None:
        self.target = target
        self.draft = draft
        self.totals = Totals()
        self._scheduler = scheduler
        self._deliver = deliver
        self._prefill_chunk = prefill_chunk
        self._generator = generator
        self._device = target.device
        self._greedy = GreedyRule()
        self._sampling: tuple[int, BatchSampling] | None = None  # of the decoding rows, by the scheduler's version
        self._speculating = draft is not None  # whether the last step drafted: then new rows' drafts must be ready
        self._seen_shapes: set[tuple[int, int]] = set()

    def plan_prompts(self) -> list[PromptChunk]:
        """What to feed next, at most `prefill_chunk` tokens."""
        return plan_prompts(self._scheduler.prefilling, self._scheduler.num_decoding, self._prefill_chunk)

    def feed(self, chunks: Rows[PromptChunk]) -> list[torch.Tensor]:
        """Feed prompts in a pass of their own; returns the logits [1, 1, vocab] after each."""
        logits = self.target.forward(self._prompt_parts(chunks))
        self._feed_draft(chunks)
        self._note_fed(chunks)
        return logits

    def start(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """Let the next sequence decode, if its prompt is complete. logits: [1, 1, vocab], after what was fed last."""
        if sequence.target_length < sequence.num_prompt_tokens:
            return
        if sequence.shared is not None:
            sequence.shared.logits = logits.clone()  # The rest of the pass need not be kept.
        self._first_token(sequence, logits)

    def _prompt_parts(self, chunks: Rows[PromptChunk]) -> list[PassPart]:
        return [prompt_part(chunk.row, chunk.ids, chunk.start, self._device) for chunk in chunks]

    def _feed_draft(self, chunks: Rows[PromptChunk]) -> None:
        """Feed prompts to the draft as well, where it will be asked for tokens next."""
        if self.draft is None:
            return
        self._feed_chunks_to_draft([chunk for chunk in chunks if self._draft_goes_along(chunk)])

    def _feed_chunks_to_draft(self, chunks: Rows[PromptChunk]) -> None:
        if not chunks:
            return
        assert self.draft is not None
        self.draft.forward(self._prompt_parts(chunks))
        for chunk in chunks:
            chunk.sequence.draft_length += len(chunk.ids)

    def _draft_goes_along(self, chunk: PromptChunk) -> bool:
        sequence = chunk.sequence
        wanted = self._speculating or bool(sequence.fixed_length)
        return wanted and sequence.may_draft and sequence.draft_length == chunk.start

    def _note_fed(self, chunks: Rows[PromptChunk]) -> None:
        for chunk in chunks:
            chunk.sequence.target_length += len(chunk.ids)

    def copy_prompt(self, sequence: Sequence) -> bool:
        """Start the next sequence with the keys, values and logits of another one of its request, if one holds them."""
        if sequence.shared is None or sequence.shared.logits is None:
            return False
        length, rows = sequence.num_prompt_tokens, self._scheduler.rows[: self._scheduler.num_decoding]
        source = next((row for row, other in enumerate(rows) if other.shared is sequence.shared), None)
        if source is None:
            return False  # Those that held them have ended.
        row = self._scheduler.num_decoding
        self.target.pool.copy(source, row, length)
        sequence.target_length = length
        if self.draft is not None and rows[source].draft_length >= length:
            self.draft.pool.copy(source, row, length)
            sequence.draft_length = length
        self._first_token(sequence, sequence.shared.logits)
        return True

    def _first_token(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """Choose the token that follows the prompt."""
        assert sequence.sampling is not None
        rule = self._rule(BatchSampling([sequence.sampling], self._device), [sequence])
        nothing_drafted = torch.zeros((1, 0), dtype=torch.long, device=self._device)
        _, tokens = rule.decide(logits, nothing_drafted, None)
        wanted = sequence.request.sampling.logprobs
        logprobs = token_logprobs(logits, tokens, [] if wanted is None else [(0, wanted)])
        self._append(sequence, tokens[0].tolist(), logprobs.get(0))
        if sequence.finished:
            self._scheduler.remove(sequence)
        else:
            self._scheduler.start_decoding()

    def decode(self, batch: list[Sequence], chosen_length: int, chunks: Rows[PromptChunk] = ()) -> StepOutcome:
        """One step of all decoding rows, with the length chosen for them. chunks: prompts to feed along.

        The caller takes finished sequences out of the scheduler.
        """
        lengths = plan_lengths(batch, chosen_length if self.draft is not None else 0, self.target.max_context_length)
        flags = self._flags(len(batch), lengths)
        width = 1
        self._speculating = lengths.length > 0
        if self._speculating:
            width, caught_up = self._catch_up(batch)
            flags |= {StepFlag.CATCH_UP} if caught_up else set()
        tensors = make_batch(batch, self._scheduler.num_drafting, lengths, width, self._device)
        num_first_uses = self._num_first_uses()
        result = self._step(tensors, lengths.length, self._batch_rule(batch), chunks)
        if self._num_first_uses() != num_first_uses:
            flags |= {StepFlag.COMPILATION}
        accepted = self._commit(batch, result, lengths)
        if result.prompt_logits:
            self._note_fed(chunks)
        histogram = [0] * (lengths.length + 1)
        for count in accepted:
            histogram[count] += 1
        return StepOutcome(lengths.length, tuple(histogram), frozenset(flags), result.prompt_logits)

    def _step(self, batch: StepBatch, length: int, rule: TokenRule, chunks: Rows[PromptChunk]) -> StepTokens:
        """The passes of a step. Prompts that make it fail, for lack of memory, must not take the other rows along."""
        try:
            prompts = self._prompt_parts(chunks)
            result = speculative_step(self.target, self.draft, batch, length, rule, prompts)
            self._feed_draft(chunks)
            return result
        except Exception:
            if not chunks:
                raise
            log.exception("a step failed together with %d prompts; it is repeated without them", len(chunks))
        return speculative_step(self.target, self.draft, batch, length, rule)

    def _num_first_uses(self) -> int:
        return self.target.num_first_uses + (self.draft.num_first_uses if self.draft is not None else 0)

    def _flags(self, batch_size: int, lengths: StepLengths) -> set[StepFlag]:
        flags = {StepFlag.MIXED_LENGTHS} if lengths.caps is not None else set()
        shape = (batch_size, lengths.length)
        if shape not in self._seen_shapes:
            self._seen_shapes.add(shape)
            flags.add(StepFlag.FIRST_USE)
        return flags

    def _batch_rule(self, batch: list[Sequence]) -> TokenRule:
        """How the decoding rows choose their tokens in this step."""
        version = self._scheduler.version
        if self._sampling is None or self._sampling[0] != version:
            rows = [sequence.sampling for sequence in batch if sequence.sampling is not None]
            self._sampling = (version, BatchSampling(rows, self._device))
        return self._rule(self._sampling[1], batch)

    def _rule(self, sampling: BatchSampling, batch: list[Sequence]) -> TokenRule:
        if sampling.is_plain_greedy:
            return self._greedy
        positions = torch.tensor([sequence.num_output_tokens for sequence in batch], device=self._device)
        return SamplingRule(sampling, positions, self._generator)

    def _catch_up(self, batch: list[Sequence]) -> tuple[int, bool]:
        """How many recent tokens the draft's first pass must be fed, and whether the draft had fallen behind.

        It lacks one token after a step that accepted everything; more means that steps went by without it.
        """
        assert self.draft is not None
        drafting = batch[: self._scheduler.num_drafting]
        behind = max(len(s.tokens) - 1 - s.draft_length for s in drafting)
        if behind <= 1:
            return 1 + behind, False
        if behind < CATCH_UP_WIDTH and min(len(s.tokens) for s in batch) > behind:
            return 1 + behind, True
        self._feed_missing(drafting)
        return 1, True

    def _feed_missing(self, drafting: list[Sequence]) -> None:
        """Give the draft all that it lacks but the pending tokens, at most `prefill_chunk` tokens in a pass."""
        chunks: list[PromptChunk] = []
        room = self._prefill_chunk
        for row, sequence in enumerate(drafting):
            at, end = sequence.draft_length, len(sequence.tokens) - 1
            while at < end:
                chunks.append(PromptChunk(sequence, row, at, sequence.tokens[at : min(end, at + room)]))
                at += len(chunks[-1].ids)
                room -= len(chunks[-1].ids)
                if not room:
                    self._feed_chunks_to_draft(chunks)
                    chunks, room = [], self._prefill_chunk
        self._feed_chunks_to_draft(chunks)

    def _commit(self, batch: list[Sequence], result: StepTokens, lengths: StepLengths) -> list[int]:
        """Hand out the new tokens and move the rows' lengths on; returns how many drafted ones each row got.

        That is what was accepted, less what the end of the request cut off: tokens that nobody gets are no reason for
        a longer length.
        """
        # The step's one synchronisation with the device.
        table = torch.cat([result.num_accepted[:, None], result.tokens], dim=1).tolist()
        wanted = [(row, s.request.sampling.logprobs) for row, s in enumerate(batch)]
        logprobs = token_logprobs(result.logits, result.tokens, [(r, k) for r, k in wanted if k is not None])
        num_drafting = self._scheduler.num_drafting if lengths.length else 0
        caps = [lengths.cap(row) for row in range(len(batch))]
        # Side by side and before any delivery: whoever reads them meanwhile divides one by the other.
        self.totals.num_steps += 1
        self.totals.num_row_steps += len(batch)
        self.totals.num_draft_tokens += sum(caps)
        kept = []
        for row, sequence in enumerate(batch):
            num_accepted, held = table[row][0], len(sequence.tokens)
            sequence.target_length = held + num_accepted
            if row < num_drafting:
                sequence.draft_length = held - 1 + min(num_accepted + 1, lengths.length)
            sequence.num_steps += 1
            sequence.num_draft_tokens += caps[row]
            kept.append(self._append(sequence, table[row][1 : num_accepted + 2], logprobs.get(row)))
        return kept

    def _append(self, sequence: Sequence, ids: list[int], logprobs: list[TokenLogprobs] | None) -> int:
        """Append to the sequence and deliver; returns how many of the ids it owes to the draft."""
        num_tokens, num_accepted = sequence.num_output_tokens, sequence.num_accepted_tokens
        output = sequence.accept(ids, logprobs)
        num_accepted = sequence.num_accepted_tokens - num_accepted
        self.totals.num_generated_tokens += sequence.num_output_tokens - num_tokens
        self.totals.num_accepted_tokens += num_accepted
        self._deliver(sequence, output)
        return num_accepted
