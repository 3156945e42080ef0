"""One step of rows that propose different numbers of tokens: n-grams, drafted ones, or none. As `speculative`.

A `ragged` model gets the tokens of each row, and the draft model runs over the rows that draft. Other models get
rectangles: verification is padded to the longest proposal, rounded up so that few shapes occur, and the draft model runs
over all rows up to the last one that drafts. Padding is overwritten later, as rejected tokens are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from speclen.worker.backends.passes import PassModel, PassPart, RaggedPart, StepRows, padded_width, prompt_part
from speclen.worker.engine.speculative import StepOutcome
from speclen.worker.engine.step_plan import StepPlan
from speclen.worker.models.upload import upload
from speclen.worker.sampling.host import HostRule, on_host, places_of
from speclen.worker.sampling.rules import TokenRule


@dataclass(slots=True)
class RaggedBatch:
    """Rows 0..b-1 of both models. texts: their tokens, the pending one last. draft_lengths: tokens in the draft's pool.

    ngrams: [b, k], n-gram tokens, num_ngrams[r] of row r; num_drafted: [b], tokens of the draft model, for rows without
    n-grams. k: of the longest proposal.
    """

    texts: list[list[int]]
    draft_lengths: np.ndarray
    ngrams: np.ndarray
    num_ngrams: np.ndarray
    num_drafted: np.ndarray

    @property
    def num_proposed(self) -> np.ndarray:
        return self.num_ngrams + self.num_drafted

    @property
    def num_tokens(self) -> np.ndarray:
        """[b], tokens of each row, the pending one included."""
        return np.array([len(text) for text in self.texts])


def make_ragged_batch(plan: StepPlan) -> RaggedBatch:
    """The plan's rows, their n-grams and draft lengths."""
    num_ngrams, num_drafted = np.array(plan.num_ngrams), np.array(plan.draft_lengths)
    ngrams = np.zeros((len(plan.rows), (num_ngrams + num_drafted).max()), np.int64)
    for row, ids in enumerate(plan.proposals.ngrams):
        ngrams[row, : len(ids)] = ids
    held = np.array([min(row.draft_length, len(row.tokens) - 1) for row in plan.rows])
    return RaggedBatch([row.tokens for row in plan.rows], held, ngrams, num_ngrams, num_drafted)


def ragged_step(
    target: PassModel,
    draft: PassModel | None,
    batch: RaggedBatch,
    rule: TokenRule,
    prompts: Sequence[PassPart] = (),
) -> StepOutcome:
    """Complete the rows' proposals, verify them in one pass of the target, and accept a prefix of each."""
    proposed = upload(batch.ngrams, target.device)
    if batch.num_drafted.any():
        assert draft is not None
        _insert(proposed, batch, _propose(draft, batch, rule))
    caps = upload(batch.num_proposed, target.device)
    if not target.ragged:
        logits, *prompt_logits = _verify_filled(target, batch, proposed, prompts)
        return *rule.decide(logits, proposed, caps), logits, prompt_logits
    rows, columns = places_of(batch.num_proposed)
    at = torch.from_numpy(rows), torch.from_numpy(columns)
    counts = batch.num_proposed + 1
    ids = torch.cat([_pending(batch, target.device), proposed], dim=1)[at]
    part = RaggedPart(np.arange(len(counts)), batch.num_tokens - 1, counts, ids, counts)
    flat, *prompt_logits = target.forward([part, *prompts])
    if isinstance(rule, HostRule):
        found = rule.verify(on_host(flat), rows, columns, proposed.numpy(), batch.num_proposed)
        decided = torch.from_numpy(found[0]), torch.from_numpy(found[1])
    else:
        filled = flat.new_zeros(len(proposed), proposed.shape[1] + 1, flat.shape[-1])
        filled[at] = flat
        decided = rule.decide(filled, proposed, caps)
    return *decided, flat.split(counts.tolist()), prompt_logits


def _verify_filled(
    target: PassModel, batch: RaggedBatch, proposed: torch.Tensor, prompts: Sequence[PassPart]
) -> list[torch.Tensor]:
    """Logits [b, k + 1, vocab] after the pending and proposed tokens; then those of the prompts."""
    fed = torch.cat([_pending(batch, target.device), proposed], dim=1)
    fed = torch.nn.functional.pad(fed, (0, padded_width(proposed.shape[1]) - proposed.shape[1]))
    part = PassPart(StepRows(batch.num_tokens - 1, fed.shape[1], target.device), fed, num_logits=fed.shape[1])
    logits, *prompt_logits = target.forward([part, *prompts])
    return [logits[:, : proposed.shape[1] + 1], *prompt_logits]


def _pending(batch: RaggedBatch, device: torch.device) -> torch.Tensor:
    return upload(np.array([text[-1:] for text in batch.texts]), device)


def _insert(proposed: torch.Tensor, batch: RaggedBatch, drafted: torch.Tensor) -> None:
    """Put drafted tokens, [n, d] for the first n rows, where these have no n-grams."""
    num_rows, longest = drafted.shape
    rows, columns = np.nonzero(np.arange(longest) < batch.num_drafted[:num_rows, None])
    at = upload(rows, drafted.device), upload(columns, drafted.device)
    proposed[at] = drafted[at]


def _propose(draft: PassModel, batch: RaggedBatch, rule: TokenRule) -> torch.Tensor:
    """Draft tokens [n, d] of the rows up to the last that drafts; entries beyond a row's draft length are undefined."""
    (rows,) = np.nonzero(batch.num_drafted)
    num_rows, longest = rows[-1] + 1, int(batch.num_drafted.max())
    drafted = torch.zeros(num_rows, longest, dtype=torch.long, device=draft.device)
    for column in range(longest):
        if column == 0:
            logits = _first_logits(draft, batch, rows)
        else:
            rows = rows[batch.num_drafted[rows] > column] if draft.ragged else rows
            logits = _next_logits(draft, batch, rows, drafted[:, column - 1], column)
        if isinstance(rule, HostRule) and len(logits) == len(rows):
            drafted[torch.from_numpy(rows), column] = torch.from_numpy(rule.draft(on_host(logits), rows, column))
        else:
            drafted[:, column] = rule.propose(_spread(logits, rows, num_rows), drafted[:, :column])
    return drafted


def _spread(logits: torch.Tensor, rows: np.ndarray, num_rows: int) -> torch.Tensor:
    """Logits [n, 1, vocab] of all rows, from those [m, vocab] of some."""
    if len(logits) == num_rows:
        return logits[:, None]
    spread = logits.new_zeros(num_rows, 1, logits.shape[-1])
    spread[upload(rows, logits.device), 0] = logits
    return spread


def _first_logits(draft: PassModel, batch: RaggedBatch, rows: np.ndarray) -> torch.Tensor:
    """Logits [m, vocab] of the drafting rows, or of rows 0..n-1, after the tokens that the draft model lacks."""
    held = batch.draft_lengths[rows]
    if draft.ragged:
        lacking = [batch.texts[row][start:] for row, start in zip(rows.tolist(), held.tolist(), strict=True)]
        counts = np.array([len(ids) for ids in lacking])
        flat = torch.tensor([token for ids in lacking for token in ids])
        return draft.forward([RaggedPart(rows, held, counts, flat, np.ones_like(counts))])[0]
    ends = batch.num_tokens[: rows[-1] + 1]
    width = int((ends[rows] - held).max())
    if ends.min() < width:  # a row is too short for a rectangle
        starts = zip(rows.tolist(), held.tolist(), strict=True)
        parts = [prompt_part(row, batch.texts[row][start:], start, draft.device) for row, start in starts]
        return torch.cat([logits[0] for logits in draft.forward(parts)])
    ids = upload(np.array([text[-width:] for text in batch.texts[: len(ends)]]), draft.device)
    return draft.forward([PassPart(StepRows(ends - width, width, draft.device), ids, num_logits=1)])[0][:, 0]


def _next_logits(
    draft: PassModel, batch: RaggedBatch, rows: np.ndarray, ids: torch.Tensor, column: int
) -> torch.Tensor:
    """Logits [m, vocab] after one more drafted token of the rows; or of rows 0..n-1. ids: [n]."""
    lengths = batch.num_tokens[: len(ids)] + column - 1
    if draft.ragged:
        every = np.ones(len(rows), np.int64)
        return draft.forward([RaggedPart(rows, lengths[rows], every, ids[torch.from_numpy(rows)], every)])[0]
    return draft.forward([PassPart(StepRows(lengths, 1, draft.device), ids[:, None], num_logits=1)])[0][:, 0]
