"""Choosing tokens at a vocabulary of 128k: operators launched outside graphs, and memory, on tensors without content."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from speclen.worker.engine.preparation import SAMPLING_BYTES
from speclen.worker.sampling.logits import RowEdits
from speclen.worker.sampling.rules import BatchSampling, RowSampling, SamplingRule

ROWS, LENGTH, VOCAB = 32, 8, 128_256
META = torch.device("meta")


class Cost(TorchDispatchMode):
    """Counts operators other than views, and the bytes of new tensors. most: the most bytes held at once."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.num_operators = self.held = self.most = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in given}  # noqa: SLF001

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_operators += not func.is_view
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if (name := storage._cdata) not in self._known:  # noqa: SLF001
            self._known.add(name)
            self.held += storage.nbytes()
            self.most = max(self.most, self.held)
            weakref.finalize(storage, self._release, name, storage.nbytes())

    def _release(self, name: int, num_bytes: int) -> None:
        self._known.discard(name)
        self.held -= num_bytes


def edits() -> RowEdits:
    return RowEdits(VOCAB, META, [1, 2], repetition_penalty=1.2, presence_penalty=0.1, logit_bias={3: 1.0})


def all_alike(**settings: Any) -> Callable[[int], RowSampling]:
    return lambda row: RowSampling(**settings)


def mixed(row: int) -> RowSampling:
    kinds = {}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "key": row}
    return RowSampling(**kinds[row % 4])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "drafting", "verifying", "bytes_each"),
    [
        pytest.param(all_alike(), 1, 13, 0, id="greedy"),
        pytest.param(all_alike(temperature=0.7), 8, 52, 13, id="drawn"),
        pytest.param(all_alike(temperature=0.7, top_p=0.9), 21, 117, 13, id="drawn by top-p"),
        pytest.param(all_alike(temperature=0.7, key=3), 47, 59, 17, id="with a seed"),
        pytest.param(mixed, 73, 131, 12, id="of all kinds"),
        pytest.param(lambda row: RowSampling(0.7, top_p=0.9, edits=edits()), 51, 147, 24, id="penalised"),
    ],
)
def test_choosing_tokens_costs_no_more_than_this(
    row: Callable[[int], RowSampling], drafting: int, verifying: int, bytes_each: float
) -> None:
    """drafting: operators per draft token; verifying: those of verification; bytes_each: per row, place and token."""
    batch = BatchSampling([row(at) for at in range(ROWS)], META)
    positions = torch.zeros(ROWS, dtype=torch.long, device=META)
    rule = SamplingRule(batch, positions, None)
    logits = torch.empty(ROWS, LENGTH + 1, VOCAB, dtype=torch.bfloat16, device=META)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long, device=META)
    with Cost(logits) as cost:
        for column in range(LENGTH):
            before = cost.num_operators
            rule.propose(logits[:, :1], ids[:, :column])
            assert cost.num_operators - before <= drafting
        before = cost.num_operators
        rule.decide(logits, ids, None)
        assert cost.num_operators - before <= verifying
    assert cost.most <= bytes_each * logits.numel() + 1e6
    assert bytes_each <= SAMPLING_BYTES
