"""Log probabilities that are reported with tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TypeAlias

import torch

from speclen.worker.requests.request import TokenLogprobs
from speclen.worker.requests.sequence import SequenceState

RowLogits: TypeAlias = torch.Tensor | Sequence[torch.Tensor]  # by row, [columns, vocab]


def logprobs_of(
    rows: Sequence[SequenceState], logits: RowLogits, ids: torch.Tensor
) -> list[list[TokenLogprobs] | None]:
    """Of each row, None for those that did not ask for them. logits, ids: as `token_logprobs`."""
    wanted = [(at, row.request.sampling.logprobs) for at, row in enumerate(rows)]
    if all(k is None for _, k in wanted):
        return [None] * len(rows)
    found = token_logprobs(logits, ids, [(at, k) for at, k in wanted if k is not None])
    return [found.get(at) for at in range(len(rows))]


def token_logprobs(
    logits: RowLogits, tokens: torch.Tensor, wanted: Sequence[tuple[int, int]]
) -> dict[int, list[TokenLogprobs]]:
    """For each (row, k) wanted, one entry per column: that of the row's token and of the k most likely ones.

    logits: of each row, [columns, vocab] as the model gave them; tokens: [rows, the most columns]. Natural logarithms.
    """
    if not wanted:
        return {}
    columns = [len(logits[row]) for row, _ in wanted]
    logprobs = torch.log_softmax(torch.cat([logits[row] for row, _ in wanted]).float(), dim=-1)
    ids = torch.cat([tokens[row, :count] for (row, _), count in zip(wanted, columns, strict=True)])
    top = logprobs.topk(max(k for _, k in wanted), dim=-1)
    found = zip(
        logprobs.gather(-1, ids[:, None])[:, 0].tolist(), top.indices.tolist(), top.values.tolist(), strict=True
    )
    return {
        row: [
            TokenLogprobs(logprob, tuple(ids[:k]), tuple(values[:k])) for logprob, ids, values in islice(found, count)
        ]
        for (row, k), count in zip(wanted, columns, strict=True)
    }
