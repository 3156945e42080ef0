"""Outputs follow the target's distribution, whatever the draft proposes, and choosing tokens needs bounded memory.

Rejection sampling is tested by exact enumeration. Shapes and truncation
are compared with loops over plain Python numbers. Memory is counted at a vocabulary of 128k, on tensors without content.
"""

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from speclen.worker.engine.preparation import SAMPLING_BYTES
from speclen.worker.sampling.logits import RowEdits
from speclen.worker.sampling.noise import exponential, make_key
from speclen.worker.sampling.rules import BatchSampling, RowSampling, SamplingRule
from speclen.worker.sampling.verification import accept_matching, acceptance, recovery

VOCAB = 3


def random_probs(*shape: int, seed: int, zeros: bool = False) -> torch.Tensor:
    """Float64 distributions; with zeros, some tokens are impossible."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(*shape, generator=generator, dtype=torch.float64) ** 3
    if zeros:
        probs[torch.rand(*shape, generator=generator) < 0.4] = 0
        probs[..., 0] += 1e-3
    return probs / probs.sum(-1, keepdim=True)


def output_distribution(target: torch.Tensor, draft: torch.Tensor, cap: int | None) -> dict[tuple[int, ...], float]:
    """Probability of every output prefix of one step, over all drafts, acceptances and recovered tokens.

    target: [k + 1, VOCAB], draft: [k, VOCAB]: position by position, the same whatever came before. cap: drafts that
    count.
    """
    k = len(draft)
    total: dict[tuple[int, ...], float] = {}
    for ids in itertools.product(range(VOCAB), repeat=k):
        drawn = math.prod(float(draft[i, token]) for i, token in enumerate(ids))
        if drawn == 0:
            continue
        allowed = k if cap is None else cap
        accept = acceptance(target[None], draft[None], torch.tensor([ids], dtype=torch.long).view(1, k))[0].tolist()
        for accepted in range(allowed + 1):
            weight = drawn * math.prod(accept[:accepted])
            if accepted < allowed:
                weight *= 1 - accept[accepted]
            following = recovery(target[None], draft[None], torch.tensor([accepted]), torch.tensor([allowed]))[0]
            following = following / following.sum()
            for token in range(VOCAB):
                output = (*ids[:accepted], token)
                total[output] = total.get(output, 0.0) + weight * float(following[token])
    return total


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("k", "cap"), [(0, None), (1, None), (2, None), (2, 1), (2, 0), (3, None)])
def test_rejection_rule_reproduces_the_target_exactly(k, cap, zeros):
    """P(first tokens of the output) = product of target probabilities, to 1e-12, for every sequence of tokens."""
    for seed in range(5):
        target = random_probs(k + 1, VOCAB, seed=seed, zeros=zeros)
        draft = random_probs(k, VOCAB, seed=100 + seed, zeros=zeros) if k else torch.zeros(0, VOCAB).double()
        outputs = output_distribution(target, draft, cap)
        assert sum(outputs.values()) == pytest.approx(1, abs=1e-12)
        longest = k if cap is None else cap
        for length in range(1, longest + 2):
            reaching = sum(p for output, p in outputs.items() if len(output) >= length)
            for prefix in itertools.product(range(VOCAB), repeat=length):
                begins = sum(p for output, p in outputs.items() if output[:length] == prefix)
                # Outputs that end earlier continue in the next step from the same target: only the last token is new.
                head = sum(
                    p
                    for output, p in outputs.items()
                    if len(output) >= length and output[:-1][: length - 1] == prefix[:-1]
                )
                expected = head * float(target[length - 1, prefix[-1]])
                assert begins == pytest.approx(expected, abs=1e-12), (prefix, reaching)


def test_recovery_of_equal_distributions_is_the_target_itself():
    """A rejection there can only be a rounding error; the difference of the two would name no token at all."""
    probs = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    assert recovery(probs, probs[:, :1], torch.tensor([0])).tolist() == [[0.25, 0.75]]


def probs_of(rows: list[RowSampling], logits: torch.Tensor) -> torch.Tensor:
    return BatchSampling(rows, logits.device).distribution(logits)


def kept_by_hand(probs: list[float], top_k: int, top_p: float, min_p: float) -> list[float]:
    """The same cuts, one token at a time."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    if top_k:
        order = order[:top_k]
    total, kept, reached = sum(probs[token] for token in order), [], 0.0
    for token in order:
        if kept and reached / total >= top_p and top_p < 1:
            break
        kept.append(token)
        reached += probs[token]
    kept = [token for token in kept if probs[token] >= min_p * probs[order[0]]]
    mass = sum(probs[token] for token in kept)
    return [probs[token] / mass if token in kept else 0.0 for token in range(len(probs))]


@pytest.mark.parametrize("top_k", [0, 1, 3, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.35, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 1.0])
def test_truncation_equals_a_plain_python_loop(top_k, top_p, min_p):
    logits = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(top_k)) * 2
    temperature = torch.tensor([0.7, 1.5])
    got = probs_of([RowSampling(float(each), top_k, top_p, min_p) for each in temperature], logits)
    for row, column in itertools.product(range(2), range(3)):
        probs = torch.softmax(logits[row, column].double() / float(temperature[row]), -1).tolist()
        expected = kept_by_hand(probs, top_k, top_p, min_p)
        assert got[row, column].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("temperature", [1e-45, 1e-20, 1e-4, 100.0])
def test_extreme_temperatures_stay_finite(temperature):
    logits = torch.tensor([[[1e4, -1e4, 0.0, 1e4 - 1]]])
    probs = probs_of([RowSampling(temperature)], logits)
    assert torch.isfinite(probs).all()
    assert probs.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_every_seed_fits_a_signed_integer(seed):
    assert -(2**63) <= make_key(seed, 63) < 2**63


ROWS, LENGTH, LARGE_VOCAB = 32, 8, 128_256
META = torch.device("meta")


class Memory(TorchDispatchMode):
    """Counts the bytes of new tensors. most: the most bytes held at once."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.held = self.most = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in given}  # noqa: SLF001

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
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
    return RowEdits(LARGE_VOCAB, META, [1, 2], repetition_penalty=1.2, presence_penalty=0.1, logit_bias={3: 1.0})


def all_alike(**settings: Any) -> Callable[[int], RowSampling]:
    return lambda row: RowSampling(**settings)


def mixed(row: int) -> RowSampling:
    kinds = {}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "key": row}
    return RowSampling(**kinds[row % 4])


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(all_alike(), id="greedy"),
        pytest.param(all_alike(temperature=0.7), id="drawn"),
        pytest.param(all_alike(temperature=0.7, top_p=0.9), id="drawn by top-p"),
        pytest.param(all_alike(temperature=0.7, key=3), id="with a seed"),
        pytest.param(mixed, id="of all kinds"),
        pytest.param(lambda row: RowSampling(0.7, top_p=0.9, edits=edits()), id="penalised"),
    ],
)
def test_choosing_tokens_takes_no_more_memory_than_is_reserved_for_it(row):
    batch = BatchSampling([row(at) for at in range(ROWS)], META)
    positions = torch.zeros(ROWS, dtype=torch.long, device=META)
    rule = SamplingRule(batch, positions, None)
    logits = torch.empty(ROWS, LENGTH + 1, LARGE_VOCAB, dtype=torch.bfloat16, device=META)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long, device=META)
    with Memory(logits) as memory:
        for column in range(LENGTH):
            rule.propose(logits[:, :1], ids[:, :column])
        rule.decide(logits, ids, None)
    assert memory.most <= SAMPLING_BYTES * logits.numel() + 1e6
