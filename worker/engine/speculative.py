"""One step of a batch: draft, verify, accept. What was rejected is rolled back by the rows' lengths alone.

Before a step a row holds n tokens, the last of which is pending: it has not been fed to any model. The target's pool
holds the keys and values of tokens 0..n-2. The draft's pool may lack more of them: the last one after a step that
accepted everything, or many after steps of length 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from speclen.worker.backends.attention import RowAttention, StepMasks
from speclen.worker.backends.cached_model import CachedModel, PassPart
from speclen.worker.sampling.rules import TokenRule


@dataclass(slots=True)
class StepBatch:
    """The decoding rows, which are rows 0..b-1 of both pools; the first `num_drafting` of them draft.

    num_tokens: [b], tokens each row holds, the pending one included, and longest the largest of them. recent_ids:
    [b, w], the last w tokens of each row: all that the draft lacks, and the pending one. caps: [b], drafts allowed per
    row, None when every row may use the step's length. start: set when all rows hold the same number of tokens.
    """

    num_tokens: torch.Tensor
    longest: int
    recent_ids: torch.Tensor
    num_drafting: int
    caps: torch.Tensor | None = None
    start: int | None = None


@dataclass(slots=True)
class StepTokens:
    """num_accepted: [b]; row r's new tokens are tokens[r, : num_accepted[r] + 1]. logits: [b, k + 1, vocab], target.

    prompt_logits: [1, 1, vocab] each, after the prompts that were fed with the verification.
    """

    num_accepted: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor
    prompt_logits: list[torch.Tensor] = field(default_factory=list)


def speculative_step(
    target: CachedModel,
    draft: CachedModel | None,
    batch: StepBatch,
    length: int,
    rule: TokenRule,
    prompts: Sequence[PassPart] = (),
) -> StepTokens:
    """Draft `length` tokens per row, verify them in one pass of the target, and accept a prefix of each.

    Length 0 is plain decoding along the same path, without the draft. The caller moves the rows' lengths on. prompts:
    of other rows, fed to the target in the same pass.
    """
    width = batch.recent_ids.shape[1]
    # Column c is the token c - (width - 1) places after the pending one.
    positions = batch.num_tokens[:, None] - width + torch.arange(width + length, device=batch.num_tokens.device)
    masks = StepMasks(positions, batch.longest + length, target.pool.dtype)

    draft_ids = batch.recent_ids.new_zeros(len(positions), length)
    if length:
        assert draft is not None
        propose(draft, batch, masks, draft_ids, rule)

    pending = batch.recent_ids[:, -1:]
    ids = torch.cat([pending, draft_ids], dim=1) if length else pending
    verification = RowAttention(target.pool, masks, slice(width - 1, None), start=_offset(batch, -1))
    logits, *prompt_logits = target.forward_with_prompts(PassPart(ids, verification, num_logits=length + 1), prompts)
    num_accepted, tokens = rule.decide(logits, draft_ids, batch.caps)
    return StepTokens(num_accepted, tokens, logits, prompt_logits)


def propose(draft: CachedModel, batch: StepBatch, masks: StepMasks, draft_ids: torch.Tensor, rule: TokenRule) -> None:
    """Fill draft_ids [b, k] for the drafting rows, one pass of the draft per token.

    The first pass also feeds the tokens that the draft lacks. A row that lacks fewer than others feeds some again, which
    writes the same keys and values over themselves.
    """
    rows, width = batch.num_drafting, batch.recent_ids.shape[1]
    drafting = masks if rows == len(draft_ids) else masks.first_rows(rows)
    ids = batch.recent_ids[:rows]
    columns, offset = slice(0, width), -width
    for column in range(draft_ids.shape[1]):
        attention = RowAttention(draft.pool, drafting, columns, start=_offset(batch, offset))
        logits = draft.forward(ids, attention, num_logits=1)
        draft_ids[:rows, column] = rule.propose(logits, draft_ids[:rows, :column])
        ids = draft_ids[:rows, column : column + 1]
        columns, offset = slice(width + column, width + column + 1), column


def _offset(batch: StepBatch, places: int) -> int | None:
    """Position that many places after the number of tokens held, when it is the same in all rows."""
    return None if batch.start is None else batch.start + places
