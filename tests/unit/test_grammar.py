"""With a grammar the output follows the target, restricted at every token to what the grammar allows.

Greedy: token by token, the most likely of those that the grammar allows, whatever is drafted. Sampled: by exact enumeration
of a grammar over five tokens, with a matcher made here.
"""

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from speclen.worker.sampling.grammar import Grammar, StepGrammars
from speclen.worker.sampling.rules import BatchSampling, RowSampling
from speclen.worker.sampling.verification import acceptance, recovery

VOCAB = 5
END = 4
TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 1.5
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))


@dataclass
class TableMatcher:
    """Follows a table: what may come after each token; the start is -1. Like llguidance's, it stays in error."""

    table: dict[int, list[int]]
    read: list[int] = field(default_factory=lambda: [-1])
    poison: tuple[int, ...] = ()  # after these it is in error for good
    unreadable: bool = False  # the last of them is not even read
    dead: bool = False

    def compute_bitmask(self) -> bytes:
        self._die()
        bits = np.zeros(VOCAB, dtype=np.uint8)
        bits[self.table[self.read[-1]]] = 1
        return np.packbits(bits, bitorder="little").tobytes()

    def consume_token(self, sampled_token: int) -> bool:
        assert not self.dead
        assert sampled_token in self.table[self.read[-1]], "only tokens that its own mask allows are read"
        self.read.append(sampled_token)
        if self.unreadable:
            self._die()
        return not self.dead

    def _die(self) -> None:
        self.dead |= bool(self.poison) and tuple(self.read[-len(self.poison) :]) == self.poison

    def rollback(self, num_tokens: int) -> bool:
        assert not self.dead
        del self.read[len(self.read) - num_tokens :]
        return True

    def deep_copy(self):
        assert not self.dead
        return TableMatcher(self.table, list(self.read), self.poison, self.unreadable)

    def is_accepting(self) -> bool:
        return END in self.table[self.read[-1]]

    def is_error(self) -> bool:
        return self.dead

    def get_error(self) -> str:
        return "too complex\nand its whole state" if self.dead else ""


# Ends after 1 only; 0 and 3 exclude each other; 2 goes with everything.
TABLE = {-1: [0, 2, 3], 0: [0, 1, 2], 1: [0, 2, END], 2: [0, 1, 2, 3], 3: [1, 3]}


def test_sampling_follows_the_restricted_target_whatever_is_drafted():
    """Exact enumeration: over every draft of two tokens, what is accepted and what is recovered add up to the target's."""
    batch = BatchSampling([RowSampling(temperature=1.0)], torch.device("cpu"))
    grammars = StepGrammars([Grammar(TableMatcher(TABLE), VOCAB, [END]).start()])
    total = torch.zeros(VOCAB, dtype=torch.double)

    def restricted(logits: torch.Tensor, draft_ids: torch.Tensor, first: int) -> torch.Tensor:
        return batch.distribution(grammars.restrict(logits, draft_ids, first)[1])

    for first, second in itertools.product(range(VOCAB), repeat=2):
        draft_ids = torch.tensor([[first, second]])
        drafted = [restricted(DRAFT[0][None, None], draft_ids[:, :0], 0)]
        drafted.append(restricted(DRAFT[first][None, None], draft_ids[:, :1], 1))
        probs = restricted(TARGET[torch.tensor([[0, first, second]])], draft_ids, 0).double()
        draft_probs = torch.cat(drafted, dim=1).double()
        share = float(draft_probs[0, 0, first] * draft_probs[0, 1, second])
        if not share:
            continue
        accepted = acceptance(probs, draft_probs, draft_ids)[0, 0].double()
        rest = recovery(probs, draft_probs, torch.tensor([0]))[0]
        total[first] += share * accepted
        total += share * (1 - accepted) * rest / rest.sum()
    law = torch.zeros(VOCAB, dtype=torch.double)
    law[TABLE[-1]] = torch.softmax(TARGET[0, TABLE[-1]].double(), -1)
    assert total.tolist() == pytest.approx(law.tolist(), abs=1e-6)


@pytest.mark.parametrize("unreadable", [False, True])
def test_a_matcher_that_fails_on_rejected_drafts_is_not_a_failure(unreadable):
    """Story: a draft that the target rejected led a matcher over its limit, and the request ended with an error."""
    state = Grammar(TableMatcher(TABLE, poison=(2, 0, 1), unreadable=unreadable), VOCAB, [END]).start()
    assert state.append([2]) == 1

    def looked_at(draft: list[int]) -> list[list[int] | None]:
        masks = state.masks(draft, 0, len(draft) + 1)
        return [None if mask is None else np.flatnonzero(mask).tolist() for mask in masks]

    for _ in range(2):
        assert looked_at([0, 1, 2]) == [TABLE[2], TABLE[0], None, None]
        assert looked_at([0, 2, 0]) == [TABLE[2], TABLE[0], TABLE[2], TABLE[0]]
    assert not state.failure
    assert state.append([0]) == 1
    assert looked_at([1, 2]) == [TABLE[0], None, None]
    assert looked_at([0, 1]) == [TABLE[0], TABLE[0], TABLE[1]]
    assert not state.failure
    assert state.append([1, 2]) == (0 if unreadable else 1)  # now it has come there
    assert state.failure == "too complex"
