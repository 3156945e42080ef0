"""One step of a `ragged` model, whose rows propose different numbers of tokens: n-grams, drafted ones, or none.

As `speculative`, but every model gets exactly the tokens of each row, and the draft model runs over the rows that draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from speclen.worker.backends.passes import PassModel, PassPart, RaggedPart
from speclen.worker.engine.speculative import StepOutcome
from speclen.worker.engine.step_plan import StepPlan
from speclen.worker.sampling.host import HostRule, on_host, places_of
from speclen.worker.sampling.rules import TokenRule


def ragged_step(
    target: PassModel,
    draft: PassModel | None,
    plan: StepPlan,
    rule: TokenRule,
    prompts: Sequence[PassPart] = (),
) -> StepOutcome:
    """Complete the rows' proposals, verify them in one pass of the target, and accept a prefix of each."""
    num_proposed = np.array(plan.num_proposed)
    proposed = torch.from_numpy(plan.ngram_table(int(num_proposed.max())))
    if plan.draft_length:
        assert draft is not None
        _draft(draft, plan, rule, proposed)
    rows, columns = places_of(num_proposed)
    at, counts = (torch.from_numpy(rows), torch.from_numpy(columns)), num_proposed + 1
    pending = torch.tensor([row.tokens[-1:] for row in plan.rows])
    starts = np.array([len(row.tokens) - 1 for row in plan.rows])
    part = RaggedPart(np.arange(len(counts)), starts, counts, torch.cat([pending, proposed], dim=1)[at], counts)
    flat, *prompt_logits = target.forward([part, *prompts])
    if isinstance(rule, HostRule):
        found = rule.verify(on_host(flat), rows, columns, proposed.numpy(), num_proposed)
        decided = torch.from_numpy(found[0]), torch.from_numpy(found[1])
    else:
        filled = flat.new_zeros(len(proposed), proposed.shape[1] + 1, flat.shape[-1])
        filled[at] = flat
        decided = rule.decide(filled, proposed, torch.from_numpy(num_proposed))
    return *decided, flat.split(counts.tolist()), prompt_logits


def _draft(draft: PassModel, plan: StepPlan, rule: TokenRule, proposed: torch.Tensor) -> None:
    """Fill in the draft tokens of the rows that draft, one pass of the draft model per token. proposed: [b, k]."""
    num_drafted = np.array(plan.draft_lengths)
    (rows,) = np.nonzero(num_drafted)
    num_rows = rows[-1] + 1
    for column in range(plan.draft_length):
        rows = rows[num_drafted[rows] > column]
        at = torch.from_numpy(rows)
        texts = [plan.rows[row].tokens for row in rows.tolist()]
        if column:
            starts = np.array([len(text) + column - 1 for text in texts])
            lacking = proposed[at, column - 1, None].tolist()
        else:
            starts = np.array(
                [min(plan.rows[row].draft_length, len(plan.rows[row].tokens) - 1) for row in rows.tolist()]
            )
            lacking = [text[start:] for text, start in zip(texts, starts.tolist(), strict=True)]
        logits = _logits_after(draft, rows, starts, lacking)
        if isinstance(rule, HostRule):
            proposed[at, column] = torch.from_numpy(rule.draft(on_host(logits), rows, column))
        else:
            every = logits.new_zeros(num_rows, 1, logits.shape[-1])
            every[at, 0] = logits
            proposed[at, column] = rule.propose(every, proposed[:num_rows, :column])[at]


def _logits_after(
    draft: PassModel, rows: np.ndarray, starts: np.ndarray, lacking: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Logits [n, vocab] of the draft model after tokens that some rows lack, each from its own position on."""
    counts = np.array([len(ids) for ids in lacking])
    flat = torch.tensor([token for ids in lacking for token in ids])
    return draft.forward([RaggedPart(rows, starts, counts, flat, np.ones_like(counts))])[0]
