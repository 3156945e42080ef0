"""Sequences longer than the draft's positions, and models whose positions exceed the memory."""

import json
import logging
import random
from pathlib import Path

import pytest

from speclen.records import Arm
from speclen.worker.arms import FixedArm
from speclen.worker.models.loading import load_pair
from tests.support import engines, tiny_models
from tests.support.engines import BACKENDS, generate, make_engine, make_pair, request
from tests.support.waiting import resident_bytes

DRAFT_CONTEXT = 48


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arm", [Arm(8), Arm(4, ngram=True)], ids=str)
def test_sequences_beyond_the_drafts_context_are_unchanged_by_drafting(arm, backend):
    """Story: a draft with 256 positions cut the target's context of 2,048 in silence."""
    # Its positions are learned, so that one too many is an error.
    draft = tiny_models.build("opt", max_position_embeddings=DRAFT_CONTEXT)
    pair = make_pair(draft=draft, draft_context_length=DRAFT_CONTEXT)
    generator = random.Random(5)
    prompts = [engines.random_prompt(generator, 70) for _ in range(3)]
    prompts += [[7] * length for length in (DRAFT_CONTEXT - 2, DRAFT_CONTEXT - 1, DRAFT_CONTEXT, DRAFT_CONTEXT + 1)]
    requests = [request(str(at), prompt, max_tokens=24, ignore_eos=True) for at, prompt in enumerate(prompts)]
    requests.append(request("several", prompts[0], max_tokens=24, ignore_eos=True, n=3, temperature=1.0, seed=3))
    limits = {"max_speculation_length": 8, "ngram": True, "backend": backend}
    drafted = generate(make_engine(pair, FixedArm(arm), **limits), *requests)
    plain = generate(make_engine(pair, 0, **limits), *requests)
    for key in plain.outputs:
        assert drafted.ids(*key) == plain.ids(*key)
        assert len(plain.ids(*key)) == 24


def test_drafting_continues_next_to_sequences_beyond_the_drafts_context():
    pair = make_pair(draft_context_length=DRAFT_CONTEXT)
    engine = make_engine(pair, 3)
    assert engine.max_context_length == tiny_models.MAX_POSITIONS
    long = [5 + at % 7 for at in range(DRAFT_CONTEXT)]
    requests = [request("long", long, max_tokens=40, ignore_eos=True)]
    requests.append(request("short", [5, 6], max_tokens=40, ignore_eos=True))
    collected = generate(engine, *requests)
    assert collected.last("long").num_draft_tokens == 0
    assert collected.last("short").num_accepted_tokens > 0
    growing = generate(engine, request("x", long[:-6], max_tokens=60, ignore_eos=True)).last("x")
    assert 0 < growing.num_draft_tokens <= 3 * 6


def test_a_draft_with_fewer_positions_is_one_warning(tmp_path, caplog):
    target = tiny_models.save(tiny_models.build("llama"), tmp_path / "target")
    draft = tiny_models.save(tiny_models.build("llama", max_position_embeddings=64), tmp_path / "draft")
    with caplog.at_level(logging.WARNING):
        pair = load_pair(target, draft, "cpu", "float32")
        assert load_pair(draft, target, "cpu", "float32").draft_context_length is None
    assert (pair.max_context_length, pair.draft_context_length) == (tiny_models.MAX_POSITIONS, 64)
    (line,) = [one.message for one in caplog.records if "continue without drafts" in one.message]
    assert "64" in line


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_billion_positions_cost_no_more_than_those_in_use(tmp_path, backend, caplog):
    """Story: `max_position_embeddings` of a billion took 23 GB in 50 seconds."""
    folder = Path(tiny_models.save(tiny_models.build("llama"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**9}))
    before = resident_bytes()
    with caplog.at_level(logging.WARNING):
        engine = make_engine(load_pair(str(folder), None, "cpu", "float32"), 0, backend=backend)
    wanted = request("x", [5, 9, 7], max_tokens=8, ignore_eos=True)
    found = generate(engine, wanted).ids("x")
    assert resident_bytes() - before < 2**28
    assert found == generate(make_engine(make_pair(), 0), wanted).ids("x")
    assert engine.max_context_length < 10**9
    assert [one for one in caplog.records if "sequences may hold" in one.message]
