"""One step of a batch: draft, verify, accept. Rejected tokens are rolled back by the rows' lengths alone.

Before a step a row has n tokens, the last of which is pending: no model has processed it. The target's pool holds the
keys and values of tokens 0..n-2. The draft's pool may lack more: one token after a fully accepted draft, or many after
steps of length 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from speclen.worker.backends.passes import HostModel, PassModel, PassPart, StepRows
from speclen.worker.sampling.host import HostRule
from speclen.worker.sampling.rules import TokenRule

RowLogits: TypeAlias = torch.Tensor | Sequence[torch.Tensor]  # by row, [columns, vocab]
# num_accepted [b], and tokens [b, k + 1] of which row r's new ones are the first num_accepted[r] + 1, none where that is -1;
# then the target's logits: of every row, [its proposals + 1 or more, vocab], and [1, 1, vocab] after each of the prompts.
StepOutcome: TypeAlias = tuple[torch.Tensor, torch.Tensor, RowLogits, list[torch.Tensor]]


@dataclass(slots=True)
class StepBatch:
    """The decoding rows, which are rows 0..b-1 of both models; the first `num_drafting` of them draft.

    num_tokens: [b], tokens of each row, the pending one included. recent_ids: [b, w], the last w tokens of each row: those
    that the draft lacks, and the pending one. caps: [b], proposed tokens per row, None for the step's length.
    ngrams: [b, k], n-gram tokens of the rows in `matched` [b], which ignore what is drafted for them; None for none.
    """

    num_tokens: np.ndarray
    recent_ids: torch.Tensor
    num_drafting: int
    caps: torch.Tensor | None = None
    ngrams: torch.Tensor | None = None
    matched: torch.Tensor | None = None


def speculative_step(
    target: PassModel,
    draft: PassModel | None,
    batch: StepBatch,
    length: int,
    rule: TokenRule,
    prompts: Sequence[PassPart] = (),
) -> StepOutcome:
    """Draft `length` tokens per row, verify them, or n-grams, in one pass of the target, and accept a prefix of each.

    Length 0 is plain decoding along the same path, without the draft. prompts: of other rows, in the same pass of the
    target. The caller updates the rows' lengths.
    """
    width = batch.recent_ids.shape[1]
    num_rows, num_proposed = len(batch.num_tokens), length if batch.ngrams is None else batch.ngrams.shape[1]
    # Column c is the token c - (width - 1) places after the pending one.
    rows = StepRows(batch.num_tokens - width, width + num_proposed, target.device)
    proposed = batch.recent_ids.new_zeros(num_rows, num_proposed)
    if length:
        assert draft is not None
        propose(draft, batch, rows, proposed[:, :length], rule)
    if batch.ngrams is not None and batch.matched is not None:
        proposed = torch.where(batch.matched[:, None], batch.ngrams, proposed)

    ids = torch.cat([batch.recent_ids[:, -1:], proposed], dim=1)
    part = PassPart(rows, ids, num_logits=num_proposed + 1, column=width - 1)
    logits, *prompt_logits = target.forward([part, *prompts])
    num_accepted, tokens = rule.decide(logits, proposed, batch.caps)
    return num_accepted, tokens, logits, prompt_logits


def host_step(
    target: HostModel,
    draft: HostModel | None,
    num_tokens: np.ndarray,
    recent_ids: np.ndarray,
    length: int,
    rule: HostRule,
) -> tuple[np.ndarray, np.ndarray]:
    """The speculative step of rows with one draft length, by numpy.

    After a pass the caches hold weights, and the next code comes from memory again: far more of it with torch than numpy.
    num_tokens: [b], recent_ids: [b, w]: as in StepBatch. Returns StepOutcome's num_accepted and tokens.
    """
    num_rows, width = recent_ids.shape
    rows, every = StepRows(num_tokens - width, width + length, target.device), np.arange(num_rows)
    fed = np.empty((num_rows, 1 + length), np.int64)
    fed[:, 0] = recent_ids[:, -1]
    ids, column = recent_ids, 0
    for drafted in range(1, length + 1):
        assert draft is not None
        fed[:, drafted] = rule.draft(draft.host_logits(rows, ids, 1, column)[:, 0], every, drafted - 1)
        column += ids.shape[1]
        ids = fed[:, drafted : drafted + 1]
    return rule.verify_even(target.host_logits(rows, fed, length + 1, width - 1), fed[:, 1:])


def propose(draft: PassModel, batch: StepBatch, rows: StepRows, draft_ids: torch.Tensor, rule: TokenRule) -> None:
    """Fill draft_ids [b, k] for the drafting rows, one pass of the draft per token.

    The first pass also processes the tokens that the draft lacks. A row that lacks fewer than others repeats some, which
    rewrites the same keys and values.
    """
    drafting = rows.first_rows(batch.num_drafting)
    ids, column = batch.recent_ids[: batch.num_drafting], 0
    for drafted in range(draft_ids.shape[1]):
        (logits,) = draft.forward([PassPart(drafting, ids, num_logits=1, column=column)])
        draft_ids[: drafting.num_rows, drafted] = rule.propose(logits, draft_ids[: drafting.num_rows, :drafted])
        column += ids.shape[1]
        ids = draft_ids[: drafting.num_rows, drafted : drafted + 1]


def host_models(target: PassModel, draft: PassModel | None) -> tuple[HostModel, HostModel | None] | None:
    """Both models, if both have their logits on the host; else None."""
    if isinstance(target, HostModel) and (draft is None or isinstance(draft, HostModel)):
        return target, draft
    return None
