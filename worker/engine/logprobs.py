"""Log probabilities that are reported with tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from speclen.worker.engine.request import TokenLogprobs


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, wanted: Sequence[tuple[int, int]]
) -> dict[int, list[TokenLogprobs]]:
    """For each (row, k) wanted, one entry per column: that of the row's token and of the k most likely ones.

    logits: [rows, columns, vocab] as the model gave them; tokens: [rows, columns]. Natural logarithms.
    """
    if not wanted:
        return {}
    rows = torch.tensor([row for row, _ in wanted], device=logits.device)
    logprobs = torch.log_softmax(logits[rows].float(), dim=-1)
    chosen = logprobs.gather(-1, tokens[rows][..., None])[..., 0].tolist()
    top = logprobs.topk(max(k for _, k in wanted), dim=-1)
    top_values, top_ids = top.values.tolist(), top.indices.tolist()
    return {
        row: [
            TokenLogprobs(logprob, tuple(ids[:k]), tuple(values[:k]))
            for logprob, ids, values in zip(chosen[at], top_ids[at], top_values[at], strict=True)
        ]
        for at, (row, k) in enumerate(wanted)
    }
