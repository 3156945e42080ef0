"""The record of a step: its arm is what ran, its counts are as measured."""

import random

import pytest

from speclen.controller.wire.ingest import read_step
from speclen.records import NGRAM_MAX_TOKENS, PLAIN, Arm, StepFlag
from speclen.worker.engine.engine import Engine
from speclen.worker.reporting.conversions import to_report
from tests.support import engines
from tests.support.control_parts import worker_metrics
from tests.support.engines import LONG, LOOP, PROMPT, Arms, Collected, RandomArms, generate, make_engine, request


def test_a_step_without_drafts_does_not_keep_the_next_prompt_from_the_draft():
    """Story: the draft's prefill depended on whether the previous step drafted, and a request's last step often does not."""
    chooser = Arms(Arm(3))
    engine = make_engine(chooser=chooser, max_batch_size=1)
    generate(engine, request("a", PROMPT, max_tokens=2, ignore_eos=True))
    assert [record.arm.speculation_length for record in chooser.records] == [0]
    chooser.records.clear()
    generate(engine, request("b", PROMPT[::-1], max_tokens=12, ignore_eos=True))
    assert not any(StepFlag.CATCH_UP in record.flags for record in chooser.records)
    assert chooser.records[0].draft_prefill_s > 0.0


@pytest.mark.parametrize(
    ("chosen", "own", "ran", "mixed"),
    [
        (Arm(3), (None, None), Arm(3), False),
        (Arm(3), (0, 0), PLAIN, False),
        (Arm(3), (2, 2), Arm(2), False),
        (Arm(3), (0, None), Arm(3), True),
        (Arm(0, True), (0, 0), PLAIN, False),
        (Arm(3, True), (0, 0), PLAIN, False),
        (Arm(3, True), (2, 2), Arm(2), False),
        (Arm(0, True), (0, None), Arm(0, True), True),
        (Arm(3, True), (None, None), Arm(3, True), False),
        (Arm(60, True), (None, None), Arm(8, True), False),
    ],
)
def test_the_arm_is_what_ran(chosen, own, ran, mixed):
    chooser = Arms(chosen)
    engine = make_engine(chooser=chooser, ngram=True)
    generate(engine, *(request(str(at), LOOP, length, **LONG) for at, length in enumerate(own)))
    record = chooser.records[0]
    assert (record.batch_size, record.arm, StepFlag.MIXED_LENGTHS in record.flags) == (2, ran, mixed)
    assert len(record.accepted_histogram) == ran.max_tokens + 1
    assert sum(record.accepted_histogram) == 2


def counted(engine: Engine, name: str, **labels: str) -> float:
    """A total of the worker's page."""
    return worker_metrics(engine).registry.get_sample_value(f"speclen_spec_decode_num_{name}_total", labels)


@pytest.mark.parametrize(
    "chooser",
    [*(Arms(arm) for arm in (PLAIN, Arm(3), Arm(0, True), Arm(3, True))), RandomArms(longest=3)],
    ids=["plain", "draft", "n-gram", "both", "changing"],
)
def test_counts_are_those_of_the_passes(chooser):
    """Story: n-gram tokens counted as accepted tokens, but not as drafts."""
    engine = make_engine(chooser=chooser, ngram=True, max_speculation_length=3)
    names, records, load = "012", chooser.records, engine.load
    collected = generate(engine, *(request(at, LOOP[int(at) :], max_tokens=100, ignore_eos=True) for at in names))
    assert sum(len(collected.ids(at)) for at in names) == 3 + sum(each.num_tokens for each in records)
    for record in records:
        assert record.num_drafted_sequences <= record.batch_size * (record.arm.speculation_length > 0)
        if not record.arm.ngram:
            assert record.num_verified_tokens == record.batch_size * (record.arm.speculation_length + 1)
    assert (load().num_ngram_tokens > 0) == any(record.arm.ngram for record in records)
    by_position = [counted(engine, "accepted_tokens_per_pos", position=str(at)) for at in range(NGRAM_MAX_TOKENS)]
    drafts, proposed, accepted = (counted(engine, name) for name in ("drafts", "draft_tokens", "accepted_tokens"))
    assert accepted == sum(record.num_tokens - record.batch_size for record in records) == sum(by_position)
    assert accepted == sum(collected.last(at).num_accepted_tokens for at in names)
    assert by_position == sorted(by_position, reverse=True)
    assert by_position[0] <= drafts <= proposed == sum(collected.last(at).num_draft_tokens for at in names)
    assert drafts <= load().num_row_steps


def num_new(chooser: Arms) -> list[int]:
    return [record.num_new_sequences for record in chooser.records]


def test_sequences_that_wait_behind_a_step_are_counted():
    chooser = Arms(PLAIN)
    engine = make_engine(chooser=chooser, max_batch_size=3)
    for name in ("a", "b", "c", "d"):
        engine.submit(request(name, PROMPT, max_tokens=5, ignore_eos=True), lambda output: None)
        for _ in range(2):
            engine.step()
    # Nobody decoded before the first one's prompt was fed. The last has no row until the first one's is free.
    assert num_new(chooser)[:5] == [0, 1, 0, 1, 0]
    generate(engine)
    assert sum(num_new(chooser)) == 3


def test_a_record_reaches_the_controller_as_it_is():
    chooser = Arms(Arm(3, True), wants_evaluations=True)
    engine = make_engine(chooser=chooser, ngram=True)
    generate(engine, *(request(str(at), LOOP, temperature=0.9 * at, seed=at, **LONG) for at in range(2)))
    told = [record._replace(seq=5, decision_version=3, probe_id=4) for record in chooser.records]
    assert any(record.evaluations for record in told)
    assert [read_step(to_report(record), engine.limits) for record in told] == told


def test_a_long_prompt_is_fed_in_chunks_and_decoding_goes_on():
    script = Arms(PLAIN)
    engine = make_engine(chooser=script, prefill_chunk=16)
    collected = Collected()
    engine.submit(request("short", PROMPT, max_tokens=60, ignore_eos=True), collected)
    for _ in range(5):
        engine.step()
    before = len(collected.ids("short"))
    engine.submit(request("long", engines.random_prompt(random.Random(0), 1) * 200, max_tokens=5), collected)
    for _ in range(200 // 16):
        engine.step()
    assert len(collected.ids("short")) == before + 200 // 16
    assert not collected.outputs["long", 0]
    assert all(StepFlag.PREFILL in result.flags for result in script.records[-12:])
    engines.finish(engine)
    assert len(collected.ids("long")) <= 5
