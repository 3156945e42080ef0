"""A report of a vLLM step means the same as a report of a step of our worker.

The batch size counts decoding sequences; prefill is separate and flagged; a step that verified one length and drafted
another gives no usable time; accepted tokens are those of verified drafts. The steps are made here, or recorded from
vLLM's scheduler.
"""

import json
from pathlib import Path

import pytest

from speclen.integrations.vllm.steps import StepTracker, Traits
from speclen.records import Arm, StepFlag, StepRecord
from speclen.worker.arms import ArmChoice
from tests.support import fake_vllm
from tests.support.vllm_steps import Steps

RECORDED = Path(__file__).parents[1] / "data" / "vllm_steps.jsonl"
LENGTH = 3
CHOICE = ArmChoice(Arm(LENGTH))


class Running(Steps):
    """Sequences that hold 100 tokens each; every step verifies what the one before drafted."""

    def __init__(self, names, traits=None):
        super().__init__(names, 100, CHOICE, traits)
        self.verified = LENGTH

    def schedule(self, choice=CHOICE, **changes):
        """Schedule a step that drafts by this choice. changes: of vLLM's output."""
        contexts = [each.num_computed_tokens for each in self.requests.values()]
        drafts = dict.fromkeys(self.requests, [1] * self.verified)
        output = fake_vllm.scheduled(dict.fromkeys(self.requests, 1 + self.verified), drafts, contexts)
        vars(output).update(changes)
        self.verified = choice.arm.speculation_length
        return self.launch(output, choice)

    def end(self, output, took_s=0.01, **accepted):
        self.now_s += took_s
        return self.take(output, accepted)

    def step(self, **accepted):
        return self.end(self.schedule(), **accepted)


@pytest.mark.parametrize(("length", "histogram"), [(2, (0, 3, 0)), (0, (3,))])
def test_a_steady_batch_gives_usable_samples(length, histogram):
    steps, choice = Running("abc"), ArmChoice(Arm(length), decision_version=3)
    accepted = dict.fromkeys("abc", min(1, length))
    records = [steps.end(steps.schedule(choice), took_s=0.02, **accepted) for _ in range(5)]
    last = records[-1]
    assert (last.batch_size, last.arm, last.accepted_histogram) == (3, Arm(length), histogram)
    assert (last.flags, last.decision_version) == (frozenset(), 3)
    assert last.latency_s == pytest.approx(0.02)
    assert StepFlag.FIRST_USE in records[1].flags


def test_prefilling_sequences_do_not_count_and_flag_the_step():
    steps = Running("a")
    steps.step()
    new = steps.requests["b"] = fake_vllm.Request("b", 100)
    for done, tokens in ((0, 64), (64, 36)):
        new.num_computed_tokens = done
        output = fake_vllm.scheduled({"a": 4, "b": tokens}, {"a": [1] * LENGTH}, [100], ["b"] if not done else [])
        record = steps.end(steps.launch(output, CHOICE), a=1)
        assert read(record) == (1, (0, 1, 0, 0))
        assert StepFlag.PREFILL in record.flags
    new.num_computed_tokens = 100
    record = steps.step(a=1, b=1)
    assert read(record) == (2, (0, 2, 0, 0))
    assert StepFlag.PREFILL not in record.flags


def test_all_steps_of_a_probe_quote_it_and_all_but_its_first_are_usable():
    """A step that verified one length and drafted another is not a usable sample of time."""
    steps, usual, probe = Running("a"), ArmChoice(Arm(2)), ArmChoice(Arm(4), 3, probe_id=9)
    records = [steps.end(steps.schedule(choice), a=1) for choice in [usual] * 3 + [probe] * 4 + [usual] * 3]
    told = [(r.probe_id, r.arm.speculation_length, StepFlag.CHANGED_ARM in r.flags) for r in records]
    probed = [(9, 4, False), (9, 4, False), (9, 4, False), (9, 4, True)]
    assert told[-7:] == [(0, 2, True), *probed, (0, 2, False), (0, 2, False)]


def test_waiting_for_requests_is_not_step_time():
    steps = Running("a")
    steps.step()
    steps.end(steps.schedule(num_scheduled_tokens={}))  # nothing to do
    steps.now_s += 100.0
    assert steps.end(steps.schedule(), took_s=0.03).latency_s == pytest.approx(0.03)


@pytest.mark.parametrize("ragged", [True, False])
def test_rows_with_shorter_drafts_are_ordinary_for_ngrams_and_mixed_for_a_draft_model(ragged):
    steps = Running("ab", Traits(ragged=ragged))
    record = steps.end(steps.schedule(scheduled_spec_decode_tokens={"b": [1] * LENGTH}), b=1)  # nothing found for a
    assert (record.arm, *read(record)) == (Arm(LENGTH), 2, (1, 1, 0, 0))
    assert (StepFlag.MIXED_LENGTHS in record.flags) is not ragged


@pytest.mark.parametrize("run", ["draft_model", "ngram"])
def test_recorded_steps_of_the_real_scheduler_read_as_they_were(run):
    """Recorded steps of vLLM 0.32's scheduler, whose own `in_prompt` and `sampled` agree with the reports."""
    tracker, num_read = StepTracker(Traits(ragged=run == "ngram"), ArmChoice(Arm(5))), 0
    for step in map(json.loads, RECORDED.read_text().splitlines()):
        if step["run"] != run:
            continue
        drafts = {name: [0] * n for name, n in step["drafts"].items()}
        output = fake_vllm.scheduled(step["tokens"], drafts, step["contexts"], step["new"], step["resumed"])
        requests = {name: fake_vllm.Request(name, 1, **values) for name, values in step["requests"].items()}
        pending = tracker.scheduled(output, requests, step["started"])
        if pending is not None:
            tracker.drafts(pending, ArmChoice(Arm(step["drafting"])))
        tracker.arrived(output, requests, step["ended"])
        runs = {name: number - 1 if number else None for name, number in step["sampled"].items()}
        result = tracker.finished(fake_vllm.sampled(runs), step["busy"])
        decoding = [name for name in step["tokens"] if name not in step["in_prompt"]]
        assert (result is not None) == bool(decoding)
        if result is None:
            continue
        num_read += 1
        accepted = sum(run * rows for run, rows in enumerate(result.accepted_histogram))
        assert (result.batch_size, accepted) == (len(decoding), sum(runs[name] or 0 for name in decoding))
        assert (StepFlag.PREFILL in result.flags) == bool(step["in_prompt"])
        assert result.num_verified_tokens == len(decoding) + sum(step["drafts"].values())
        assert result.num_drafted_sequences == sum(number > 0 for number in step["drafts"].values())
    assert num_read > 50
    assert tracker.num_odd == 0


def read(record: StepRecord | None) -> tuple[int, tuple[int, ...]]:
    return record.batch_size, record.accepted_histogram


def test_requests_that_ended_count_for_time_and_not_for_acceptance():
    """vLLM keeps what they accepted behind their end: one false sample for every request, 7% of all at 13 steps each."""
    steps = Running("abc", Traits(keeps_ended=True))
    output = steps.schedule()
    del steps.requests["a"]  # it ended in the step before
    steps.requests["b"].is_over = True  # likewise, and somebody still reads its KV
    record = steps.end(output, a=3, b=2, c=1)
    assert read(record) == (3, (0, 1, 0, 0))
    assert record.num_verified_tokens == 3 * (1 + LENGTH), "they were computed"
    assert steps.tracker.num_odd == 0


def test_a_step_in_which_no_request_continues_is_not_reported():
    steps = Running("ab")
    output = steps.schedule()
    steps.requests.clear()
    assert steps.end(output, a=1) is None
    assert steps.tracker.num_odd == 0


def test_drafts_that_a_grammar_forbids_do_not_count_as_rejected():
    steps = Running("abc")
    output = steps.schedule()
    output.num_invalid_spec_tokens = {"a": 2, "c": 0}  # known when the step before has ended
    assert read(steps.end(output, a=1, b=3, c=2)) == (3, (0, 0, 1, 1))


@pytest.mark.parametrize(("longest_context", "is_void"), [(104, False), (103, True), (None, False)])
def test_drafts_beyond_the_draft_models_context_are_not_counted(longest_context, is_void):
    """One long sequence makes the drafts of its whole batch zeros, and the batch accepts none in the next step."""
    steps = Running("ab", Traits(longest_context=longest_context))
    steps.requests["b"].num_computed_tokens = 20
    before, after = steps.step(a=1), steps.step()
    assert (StepFlag.CHANGED_ARM in before.flags) is is_void, "it did not draft"
    assert (StepFlag.MIXED_LENGTHS in after.flags) is is_void, "it verified zeros"
    assert StepFlag.MIXED_LENGTHS not in before.flags


def test_a_step_that_skips_its_drafts_takes_other_time():
    steps = Running("a")
    steps.step()
    steps.step()
    skipped = steps.end(steps.schedule(skip_drafts=True))
    assert StepFlag.CHANGED_ARM in skipped.flags


def test_a_step_without_tokens_does_not_cut_the_one_in_flight():
    steps = Running("a", Traits(overlapped=True))
    first, second = steps.schedule(), steps.schedule()
    steps.end(first)
    steps.end(steps.schedule(num_scheduled_tokens={}), took_s=0.004)
    record = steps.end(second, took_s=0.006)
    assert record.latency_s == pytest.approx(0.010)


def test_tokens_that_do_not_add_up_are_not_reported():
    steps = Running("a")
    assert steps.step(a=LENGTH + 1) is None
    assert steps.tracker.num_odd == 1
