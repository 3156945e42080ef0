"""Counts of speculation agree with one another, whatever proposes: a draft model, copies, or both."""

from __future__ import annotations

import pytest
from engines import RandomPlans, generate, make_engine, request
from prometheus_client import CollectorRegistry, generate_latest

from speclen.v1 import control_pb2 as pb
from speclen.worker.drafting.plan import Plan
from speclen.worker.engine.engine import Engine
from speclen.worker.engine.length_chooser import FixedPlan, LengthChooser
from speclen.worker.observing.metrics import WorkerMetrics
from speclen.worker.reporting.control_client import ControlClient, WorkerCard
from speclen.worker.reporting.length_table import LengthTable

LOOP = [3, 4, 5, 6] * 5  # there is always something to copy


def page(engine: Engine) -> CollectorRegistry:
    card = WorkerCard("w", 1, pb.ContextKey(), 4, 3, "127.0.0.1:1", "adaptive")
    control = ControlClient(card, LengthTable.constant(2, 4, "default"), follow=True)
    return WorkerMetrics(engine, control).registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(f"speclen_spec_decode_num_{name}_total", labels)
    assert found is not None, generate_latest(registry).decode()
    return found


@pytest.mark.parametrize(
    "chooser",
    [FixedPlan(Plan(3)), FixedPlan(Plan(0, 1, 4)), FixedPlan(Plan(2, 1, 4, True)), RandomPlans(longest=3)],
    ids=["drafts", "copies", "both", "changing"],
)
def test_one_definition_for_all_counts(chooser: LengthChooser) -> None:
    """Copies were in the numbers of tokens and in no other: of copies alone, tokens were accepted in no proposal."""
    engine = make_engine(chooser=chooser, max_copied_tokens=6, max_speculation_length=3)
    names = [str(at) for at in range(3)]
    collected = generate(
        engine, *(request(name, LOOP[at:], max_tokens=20 + at, ignore_eos=True) for at, name in enumerate(names))
    )
    registry = page(engine)
    by_position = [value(registry, "accepted_tokens_per_pos", position=str(at)) for at in range(9)]
    drafts, proposed, accepted = (value(registry, name) for name in ("drafts", "draft_tokens", "accepted_tokens"))
    assert by_position == sorted(by_position, reverse=True)
    assert sum(by_position) == accepted == sum(collected.last(name).num_accepted_tokens for name in names)
    assert by_position[0] <= drafts <= proposed == sum(collected.last(name).num_draft_tokens for name in names)
    assert 0 < drafts <= engine.load().num_row_steps
