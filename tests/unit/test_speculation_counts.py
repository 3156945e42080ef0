"""Counts of speculation agree with one another, whatever proposes: a draft model, n-grams, or both."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from speclen.records import NGRAM_MAX_TOKENS, Arm
from speclen.worker.drafting.arm_chooser import ArmChooser, FixedArm
from tests.support.engines import RandomArms, generate, make_engine, request
from tests.support.worker_page import worker_metrics

LOOP = [3, 4, 5, 6] * 5


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(f"speclen_spec_decode_num_{name}_total", labels)
    assert found is not None, generate_latest(registry).decode()
    return found


@pytest.mark.parametrize(
    "chooser",
    [FixedArm(Arm(3)), FixedArm(Arm(0, ngram=True)), FixedArm(Arm(2, ngram=True)), RandomArms(longest=3)],
    ids=["draft", "n-gram", "both", "changing"],
)
def test_one_definition_for_all_counts(chooser: ArmChooser) -> None:
    """Story: n-gram tokens alone were accepted in no proposal, since they counted as tokens and nothing else."""
    engine = make_engine(chooser=chooser, ngram=True, max_speculation_length=3)
    names = [str(at) for at in range(3)]
    collected = generate(
        engine, *(request(name, LOOP[at:], max_tokens=100 + at, ignore_eos=True) for at, name in enumerate(names))
    )
    registry = worker_metrics(engine).registry
    by_position = [value(registry, "accepted_tokens_per_pos", position=str(at)) for at in range(NGRAM_MAX_TOKENS)]
    drafts, proposed, accepted = (value(registry, name) for name in ("drafts", "draft_tokens", "accepted_tokens"))
    assert by_position == sorted(by_position, reverse=True)
    assert sum(by_position) == accepted == sum(collected.last(name).num_accepted_tokens for name in names)
    assert by_position[0] <= drafts <= proposed == sum(collected.last(name).num_draft_tokens for name in names)
    assert 0 < drafts <= engine.load().num_row_steps
