"""Accepted tokens in a report of vLLM's steps are those of sequences that show what their drafts were worth."""

from __future__ import annotations

from typing import Any

import pytest

from speclen.integrations.vllm.steps import StepTracker, Traits
from speclen.records import Arm, StepFlag, StepRecord
from speclen.worker.drafting.arm_chooser import ArmChoice
from tests.support import fake_vllm

LENGTH = 3


class Steps:
    """A scheduler's steps, one after another, of sequences that hold 100 tokens each."""

    def __init__(self, names: str, traits: Traits | None = None) -> None:
        self.tracker = StepTracker(traits or Traits(), ArmChoice(Arm(LENGTH)))
        self.requests = {name: fake_vllm.Request(name, 100, num_computed_tokens=100) for name in names}
        self.now = 0.0

    def schedule(self, **changes: Any) -> Any:
        contexts = [each.num_computed_tokens for each in self.requests.values()]
        drafts = dict.fromkeys(self.requests, [1] * LENGTH)
        output = fake_vllm.scheduled(dict.fromkeys(self.requests, 1 + LENGTH), drafts, contexts)
        vars(output).update(changes)
        pending = self.tracker.scheduled(output, self.requests, self.now)
        if pending is not None:
            self.tracker.drafts(pending, ArmChoice(Arm(LENGTH)))
        return output

    def end(self, output: Any, took_s: float = 0.01, **accepted: int) -> StepRecord | None:
        """Take the result: by sequence how many tokens were accepted, none for those that are not named."""
        self.now += took_s
        self.tracker.arrived(output, self.requests, self.now)
        sampled = fake_vllm.sampled({name: accepted.get(name, 0) for name in output.num_scheduled_tokens})
        return self.tracker.finished(sampled, True)

    def step(self, **accepted: int) -> StepRecord | None:
        return self.end(self.schedule(), **accepted)


def read(record: StepRecord | None) -> tuple[int, tuple[int, ...]]:
    return record.batch_size, record.accepted_histogram


def test_requests_that_ended_count_for_time_and_not_for_acceptance():
    """vLLM keeps what they accepted behind their end: one false sample for every request, 7% of all at 13 steps each."""
    steps = Steps("abc")
    output = steps.schedule()
    del steps.requests["a"]  # it ended in the step before
    steps.requests["b"].is_over = True  # likewise, and somebody still reads its KV
    record = steps.end(output, a=3, b=2, c=1)
    assert read(record) == (3, (0, 1, 0, 0))
    assert record.num_verified_tokens == 3 * (1 + LENGTH), "they were computed"
    assert steps.tracker.num_odd == 0


def test_a_step_in_which_no_request_goes_on_is_not_reported():
    steps = Steps("ab")
    output = steps.schedule()
    steps.requests.clear()
    assert steps.end(output, a=1) is None
    assert steps.tracker.num_odd == 0


def test_drafts_that_a_grammar_forbids_do_not_count_as_rejected():
    steps = Steps("abc")
    output = steps.schedule()
    output.num_invalid_spec_tokens = {"a": 2, "c": 0}  # known when the step before has ended
    assert read(steps.end(output, a=1, b=3, c=2)) == (3, (0, 0, 1, 1))


@pytest.mark.parametrize(("longest_context", "is_void"), [(104, False), (103, True), (None, False)])
def test_drafts_beyond_the_draft_models_context_are_no_predictions(longest_context, is_void):
    """One long sequence makes the drafts of its whole batch zeros, and the batch accepts none in the next step."""
    steps = Steps("ab", Traits(longest_context=longest_context))
    steps.requests["b"].num_computed_tokens = 20
    before, after = steps.step(a=1), steps.step()
    assert (StepFlag.CHANGED_ARM in before.flags) is is_void, "it did not draft"
    assert (StepFlag.MIXED_LENGTHS in after.flags) is is_void, "it verified zeros"
    assert StepFlag.MIXED_LENGTHS not in before.flags


def test_a_step_that_skips_its_drafts_takes_other_time():
    steps = Steps("a")
    steps.step()
    steps.step()
    skipped = steps.end(steps.schedule(skip_drafts=True))
    assert StepFlag.CHANGED_ARM in skipped.flags


def test_a_step_without_tokens_does_not_cut_the_one_in_flight():
    steps = Steps("a", Traits(overlapped=True))
    first, second = steps.schedule(), steps.schedule()
    steps.end(first)
    steps.end(steps.schedule(num_scheduled_tokens={}), took_s=0.004)
    record = steps.end(second, took_s=0.006)
    assert record.latency_s == pytest.approx(0.010)


def test_tokens_that_do_not_add_up_are_not_reported():
    steps = Steps("a")
    assert steps.step(a=LENGTH + 1) is None
    assert steps.tracker.num_odd == 1
