"""The rule of the host gives every row the tokens that the rule for rows of all kinds gives it, and draws no noise twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from speclen.worker.sampling.host import HostRule
from speclen.worker.sampling.noise import make_key
from speclen.worker.sampling.rules import BatchSampling, RowSampling, SamplingRule

VOCAB, ROWS, K = 40, 60, 4
CPU = torch.device("cpu")


def batch_of(seeded: bool = True) -> BatchSampling:
    """Rows of several temperatures, greedy ones among them."""
    temperatures = [0.0, 0.5, 1.0, 1e-9]
    keys = [make_key(row, 0) if seeded else None for row in range(ROWS)]
    return BatchSampling([RowSampling(temperatures[row % 4], key=key) for row, key in enumerate(keys)], CPU)


def logits_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3.0


def both(batch: BatchSampling, num_copied: np.ndarray | None = None) -> tuple[HostRule, SamplingRule]:
    positions, generator = np.arange(ROWS) % 7, torch.Generator().manual_seed(0)
    copied = None if num_copied is None else torch.from_numpy(num_copied)
    host = HostRule(batch.for_host, positions.tolist(), generator, num_copied)
    return host, SamplingRule(batch, torch.from_numpy(positions), generator, copied)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copies", [False, True])
def test_drafts_and_decisions_are_those_of_the_rule_for_all_rows(copies: bool, dtype: torch.dtype) -> None:
    num_copied = np.arange(ROWS) % 3 if copies else None
    host, general = both(batch_of(), num_copied)
    ids = torch.zeros(ROWS, 0, dtype=torch.long)
    for column in range(K):
        logits = logits_of(column, ROWS, 1).to(dtype)
        proposed = host.propose(logits, ids)
        assert torch.equal(proposed, general.propose(logits, ids))
        ids = torch.cat([ids, proposed[:, None]], dim=1)
    for caps in (None, torch.arange(ROWS) % (K + 1)):
        logits = logits_of(9, ROWS, K + 1).to(dtype)
        (accepted, tokens), (expected, wanted) = host.decide(logits, ids, caps), general.decide(logits, ids, caps)
        assert torch.equal(accepted, expected)
        for row, count in enumerate(accepted.tolist()):
            assert tokens[row, : count + 1].tolist() == wanted[row, : count + 1].tolist()
