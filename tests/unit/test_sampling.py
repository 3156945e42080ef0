"""Outputs follow the target's distribution, whatever the draft proposes.

Rejection sampling is tested by exact enumeration. Shapes and truncation are compared with loops over plain Python numbers.
"""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from speclen.records import Arm
from speclen.worker.arms import ArmChoice
from speclen.worker.engine.speculative import speculative_step
from speclen.worker.engine.step_plan import Proposals, StepPlan
from speclen.worker.sampling.host import HostRule
from speclen.worker.sampling.logits import RowEdits
from speclen.worker.sampling.noise import make_key
from speclen.worker.sampling.rules import BatchSampling, RowSampling, SamplingRule
from speclen.worker.sampling.verification import acceptance, recovery

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


# Steps of a batch.

HOST_VOCAB, ROWS, K = 40, 60, 4


def logits_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, HOST_VOCAB, generator=torch.Generator().manual_seed(seed)) * 3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copies", [False, True])
def test_host_and_device_rules_agree_on_drafts_and_decisions(copies, dtype):
    """Rows are of several temperatures, greedy ones among them."""
    num_copied = np.arange(ROWS) % 3 if copies else None
    positions, generator = np.arange(ROWS) % 7, torch.Generator().manual_seed(0)
    rows = [RowSampling((0.0, 0.5, 1.0, 1e-9)[row % 4], key=make_key(row, 0)) for row in range(ROWS)]
    batch = BatchSampling(rows, torch.device("cpu"))
    host = HostRule(batch.for_host, positions.tolist(), generator, num_copied)
    copied = None if num_copied is None else torch.from_numpy(num_copied)
    general = SamplingRule(batch, torch.from_numpy(positions), generator, copied)
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


def test_a_truncated_draft_leaves_the_targets_distribution_as_it_is():
    """Drafts are drawn among the 64 likeliest of 100 tokens of similar probability. False alarms: 1 in 10,000."""
    num_rows, k, kinds = 8_000, 2, [RowSampling(1.0, top_k=90), RowSampling(1.0, top_k=90, key=5)]
    logits = torch.linspace(0, 1, 100).expand(num_rows, k + 1, 100)
    for kind in kinds:
        batch, found = BatchSampling([kind] * num_rows, logits.device), []
        positions = torch.arange(num_rows)
        for length in (0, k):
            rule, ids = (
                SamplingRule(batch, positions, torch.Generator().manual_seed(3)),
                torch.zeros(num_rows, 0).long(),
            )
            for _ in range(length):
                ids = torch.cat([ids, rule.propose(logits[:, :1], ids)[:, None]], dim=1)
            assert not length or ids.min() >= 100 - 64
            num_accepted, tokens = rule.decide(logits[:, : length + 1], ids, None)
            assert not length or 0.6 < float(num_accepted.double().mean()) / k < 1
            found.append(tokens[:, 0])
        if kind.key is not None:
            assert torch.equal(*found), "whatever was drafted"
            continue
        expected = num_rows * torch.softmax(logits[0, 0, 10:].double(), -1)
        for tokens in found:
            counts = torch.bincount(tokens, minlength=100)
            assert not counts[:10].any()
            assert float(((counts[10:] - expected) ** 2 / expected).sum()) < 148  # chi-square of 89 degrees of freedom


@pytest.mark.parametrize(("length", "ngrams"), [(0, []), (4, []), (0, [1, 2, 3]), (4, [1, 2, 3])])
@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, {"key": 5}])
def test_launching_a_step_never_waits_for_the_device(settings, edited, length, ngrams):
    """Operators that wait for the device raise on the device "meta"."""

    def forward(parts: list[Any]) -> list[torch.Tensor]:
        return [
            torch.empty(part.rows.num_rows, part.num_logits, 64, device=part.rows.positions.device) for part in parts
        ]

    model: Any = SimpleNamespace(device=torch.device("meta"), forward=forward)
    edits = RowEdits(64, model.device, [1, 2], 1.2, 0.1, 0.1, {3: 1.0}, [7], 4) if edited else None
    sampled = RowSampling(**{"temperature": 0.7} | settings, edits=edits)
    proposals = Proposals(Arm(length, bool(ngrams)), [0 if ngrams else length, length], [ngrams, []])
    rows: list[Any] = [SimpleNamespace(tokens=list(range(5))), SimpleNamespace(tokens=list(range(9)))]
    plan = StepPlan(rows, 2, ArmChoice(proposals.arm), proposals, [], prefilled=False)
    counts = torch.tensor(plan.num_ngrams, device=model.device)
    for row in (sampled, RowSampling()):
        batch = BatchSampling([row, RowSampling()], model.device)
        rule = SamplingRule(batch, counts + 3, None, counts if ngrams else None)
        num_accepted, ids, _, _ = speculative_step(model, model, plan, 2, rule)
        assert num_accepted.device == ids.device == model.device
