"""One step of a batch: draft, verify, accept. Rejected tokens are rolled back by shortening the rows.

Before a step a row has n tokens. The last one is pending: no model has processed it. The target's KV cache holds the keys
and values of tokens 0..n-2. The draft model's may lack more: one token after a fully accepted draft, or many after steps of
length 0. The sequences are rows 0..b-1 of both caches.

The step has three forms. `speculative_step` fits every model and plan, and pads rows to the longest. `host_step` does the
same in numpy, for rows with one draft length. `ragged_step` gives a `ragged` model exactly the tokens of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

import numpy as np
import torch

from speclen.records import StepFlag
from speclen.worker.backends.passes import HostModel, PassModel, PassPart, RaggedPart, StepRows, padded_width
from speclen.worker.engine.step_plan import StepPlan
from speclen.worker.models.devices import upload
from speclen.worker.requests.request import TokenLogprobs
from speclen.worker.requests.sequence import SequenceState
from speclen.worker.sampling.host import HostRule, on_host, places_of
from speclen.worker.sampling.rules import TokenRule

RowLogits: TypeAlias = torch.Tensor | Sequence[torch.Tensor]  # by row, [columns, vocab]
# num_accepted [b], and tokens [b, k + 1]: the first num_accepted[r] + 1 are the new tokens of row r, none if it is
# -1. Then the target's logits: of each row [proposals + 1, more if padded, vocab], after each prompt [1, 1, vocab].
StepOutcome: TypeAlias = tuple[torch.Tensor, torch.Tensor, RowLogits, list[torch.Tensor]]


def speculative_step(
    target: PassModel,
    draft: PassModel | None,
    plan: StepPlan,
    width: int,
    rule: TokenRule,
    prompts: Sequence[PassPart] = (),
) -> StepOutcome:
    """Draft tokens for the rows, verify these or n-gram tokens in one forward pass of the target, and accept a prefix.

    Length 0 is plain decoding along the same path, without the draft model. width: number of last tokens of each row that
    the draft model lacks, including the pending one. prompts: of other rows, for the same forward pass of the target. The
    caller updates the rows' lengths.
    """
    device, length = target.device, plan.draft_length
    num_proposed = padded_width(max(plan.num_proposed)) if plan.has_ngrams else length
    recent_ids = upload(np.array([row.tokens[-width:] for row in plan.rows]), device)
    caps = None if plan.is_even and not plan.has_ngrams else upload(np.array(plan.num_proposed), device)
    ngrams = upload(plan.ngram_table(num_proposed), device) if plan.has_ngrams else None
    matched = upload(np.array(plan.num_ngrams) > 0, device) if plan.has_ngrams else None
    # Column width - 1 is the pending token. Columns before it are earlier tokens, columns after it proposals.
    rows = StepRows(num_tokens_of(plan) - width, width + num_proposed, device)
    proposed = recent_ids.new_zeros(len(plan.rows), num_proposed)
    if length:
        assert draft is not None
        _draft(draft, rows.first_rows(plan.num_drafting), recent_ids, proposed[:, :length], rule)
    if ngrams is not None and matched is not None:
        proposed = torch.where(matched[:, None], ngrams, proposed)
    ids = torch.cat([recent_ids[:, -1:], proposed], dim=1)
    part = PassPart(rows, ids, num_logits=num_proposed + 1, column=width - 1)
    logits, *prompt_logits = target.forward([part, *prompts])
    return *rule.decide(logits, proposed, caps), logits, prompt_logits


def _draft(
    draft: PassModel, rows: StepRows, recent_ids: torch.Tensor, draft_ids: torch.Tensor, rule: TokenRule
) -> None:
    """Fill draft_ids [b, k] for the drafting rows, with one forward pass of the draft model per token.

    The first pass also processes the tokens that the draft model lacks. A row that lacks fewer than the others repeats
    some, which rewrites the same keys and values.
    """
    ids, column = recent_ids[: rows.num_rows], 0
    for drafted in range(draft_ids.shape[1]):
        (logits,) = draft.forward([PassPart(rows, ids, num_logits=1, column=column)])
        draft_ids[: rows.num_rows, drafted] = rule.propose(logits, draft_ids[: rows.num_rows, :drafted])
        column += ids.shape[1]
        ids = draft_ids[: rows.num_rows, drafted : drafted + 1]


def host_step(
    target: HostModel, draft: HostModel | None, plan: StepPlan, width: int, rule: HostRule
) -> tuple[np.ndarray, np.ndarray]:
    """StepOutcome's num_accepted and tokens, computed in numpy. width: as in speculative_step.

    A forward pass fills the processor's caches with weights, so the code that runs next must be read from memory again.
    torch's operators have far more code than numpy's.
    """
    length = plan.draft_length
    rows, every = StepRows(num_tokens_of(plan) - width, width + length, target.device), np.arange(len(plan.rows))
    ids, column = np.array([row.tokens[-width:] for row in plan.rows]), 0
    fed = np.empty((len(plan.rows), 1 + length), np.int64)
    fed[:, 0] = ids[:, -1]
    for drafted in range(1, length + 1):
        assert draft is not None
        fed[:, drafted] = rule.draft(draft.host_logits(rows, ids, 1, column)[:, 0], every, drafted - 1)
        column += ids.shape[1]
        ids = fed[:, drafted : drafted + 1]
    return rule.verify_even(target.host_logits(rows, fed, length + 1, width - 1), fed[:, 1:])


def host_models(target: PassModel, draft: PassModel | None) -> tuple[HostModel, HostModel | None] | None:
    """Both models, if the logits of both are in the host's memory; else None."""
    if isinstance(target, HostModel) and (draft is None or isinstance(draft, HostModel)):
        return target, draft
    return None


def ragged_step(
    target: PassModel, draft: PassModel | None, plan: StepPlan, rule: TokenRule, prompts: Sequence[PassPart] = ()
) -> StepOutcome:
    """As speculative_step, without padding; the draft model processes only the rows that draft."""
    num_proposed = np.array(plan.num_proposed)
    proposed = torch.from_numpy(plan.ngram_table(int(num_proposed.max())))
    if plan.draft_length:
        assert draft is not None
        _draft_ragged(draft, plan, rule, proposed)
    rows, columns = places_of(num_proposed)
    at, counts = (torch.from_numpy(rows), torch.from_numpy(columns)), num_proposed + 1
    pending = torch.tensor([row.tokens[-1:] for row in plan.rows])
    ids = torch.cat([pending, proposed], dim=1)[at]
    part = RaggedPart(np.arange(len(counts)), num_tokens_of(plan) - 1, counts, ids, counts)
    flat, *prompt_logits = target.forward([part, *prompts])
    if isinstance(rule, HostRule):
        found = rule.verify(on_host(flat), rows, columns, proposed.numpy(), num_proposed)
        decided = torch.from_numpy(found[0]), torch.from_numpy(found[1])
    else:
        filled = flat.new_zeros(len(proposed), proposed.shape[1] + 1, flat.shape[-1])
        filled[at] = flat
        decided = rule.decide(filled, proposed, torch.from_numpy(num_proposed))
    return *decided, flat.split(counts.tolist()), prompt_logits


def _draft_ragged(draft: PassModel, plan: StepPlan, rule: TokenRule, proposed: torch.Tensor) -> None:
    """Fill proposed [b, k] for the rows that draft, with one forward pass of the draft model per token."""
    num_drafted = np.array(plan.draft_lengths)
    (rows,) = np.nonzero(num_drafted)
    num_rows = rows[-1] + 1
    for column in range(plan.draft_length):
        rows = rows[num_drafted[rows] > column]
        at = torch.from_numpy(rows)
        drafting = [plan.rows[row] for row in rows.tolist()]
        if column:
            starts = np.array([len(row.tokens) + column - 1 for row in drafting])
            lacking = proposed[at, column - 1, None].tolist()
        else:
            starts = np.array([min(row.draft_length, len(row.tokens) - 1) for row in drafting])
            lacking = [row.tokens[start:] for row, start in zip(drafting, starts.tolist(), strict=True)]
        counts = np.array([len(ids) for ids in lacking])
        flat = torch.tensor([token for ids in lacking for token in ids])
        (logits,) = draft.forward([RaggedPart(rows, starts, counts, flat, np.ones_like(counts))])
        if isinstance(rule, HostRule):
            proposed[at, column] = torch.from_numpy(rule.draft(on_host(logits), rows, column))
        else:
            every = logits.new_zeros(num_rows, 1, logits.shape[-1])
            every[at, 0] = logits
            proposed[at, column] = rule.propose(every, proposed[:num_rows, :column])[at]


def num_tokens_of(plan: StepPlan) -> np.ndarray:
    """[b]: number of tokens of each row, including the pending one."""
    return np.array([len(row.tokens) for row in plan.rows])


@dataclass(slots=True)
class Decided:
    """Tokens chosen for sequences, as in StepOutcome. logits: empty if no log probabilities are wanted."""

    sequences: Sequence[SequenceState]
    num_accepted: torch.Tensor | np.ndarray
    ids: torch.Tensor | np.ndarray
    logits: RowLogits = ()

    def read(self) -> tuple[list[list[int]], list[list[TokenLogprobs] | None]]:
        """New tokens of each sequence, and their log probabilities. Waits for the device."""
        return new_tokens(self.num_accepted, self.ids), logprobs_of(self.sequences, self.logits, self.ids)


@dataclass(slots=True)
class LaunchedStep:
    """A step that the device is running. decided: for the decoding rows, then for sequences whose prompts it completes.

    flags: reasons why it is not a usable sample. After `read`, for each sequence of the plan in order: ids, its new tokens,
    None if its prompt is not complete, empty if its logits are NaN or infinite; and logprobs, None unless wanted.
    """

    plan: StepPlan
    flags: set[StepFlag]
    decided: list[Decided] = field(default_factory=list)
    ids: list[list[int] | None] = field(default_factory=list)
    logprobs: list[list[TokenLogprobs] | None] = field(default_factory=list)

    def read(self) -> None:
        """Set ids and logprobs. Waits for the device."""
        for decided in self.decided:
            ids, logprobs = decided.read()
            self.ids += ids
            self.logprobs += logprobs
        for at, chunk in enumerate(self.plan.chunks, len(self.plan.rows)):
            if not chunk.completes_prompt:
                self.ids.insert(at, None)
                self.logprobs.insert(at, None)


def new_tokens(num_accepted: torch.Tensor | np.ndarray, ids: torch.Tensor | np.ndarray) -> list[list[int]]:
    """The first num_accepted + 1 tokens of each row, none for -1. On a GPU this is the step's one synchronisation."""
    if isinstance(num_accepted, torch.Tensor) and isinstance(ids, torch.Tensor) and not ids.is_cpu:
        table = torch.cat([num_accepted[:, None], ids], dim=1).tolist()
        return [row[1 : row[0] + 2] for row in table]
    return [row[: count + 1] for count, row in zip(num_accepted.tolist(), ids.tolist(), strict=True)]


def logprobs_of(
    rows: Sequence[SequenceState], logits: RowLogits, ids: torch.Tensor | np.ndarray
) -> list[list[TokenLogprobs] | None]:
    """Natural log probabilities of each row's tokens and of the most likely ones; None for rows that want none.

    logits: [columns, vocab] of each row, as the model gave them; ids: [rows, largest number of columns].
    """
    found: list[list[TokenLogprobs] | None] = [None] * len(rows)
    asked = rows if len(logits) else ()
    wanted = [(at, k) for at, row in enumerate(asked) if (k := row.request.sampling.logprobs) is not None]
    if not wanted:
        return found
    counts = [len(logits[at]) for at, _ in wanted]
    logprobs = torch.log_softmax(torch.cat([logits[at] for at, _ in wanted]).float(), dim=-1)
    tokens = torch.cat([torch.as_tensor(ids[at, :count]) for (at, _), count in zip(wanted, counts, strict=True)])
    top = logprobs.topk(max(k for _, k in wanted), dim=-1)
    own = logprobs.gather(-1, tokens[:, None])[:, 0]
    entries = zip(own.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
    for (at, k), count in zip(wanted, counts, strict=True):
        found[at] = [
            TokenLogprobs(logprob, tuple(likely[:k]), tuple(values[:k]))
            for logprob, likely, values in islice(entries, count)
        ]
    return found
