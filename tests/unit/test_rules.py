"""Choices of a whole step: host and device agree, and what was drafted changes no distribution."""

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

VOCAB, ROWS, K = 40, 60, 4


def logits_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3.0


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
