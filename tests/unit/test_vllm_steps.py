"""A step of vLLM means in a report what a step of our worker means.

Batch size is rows that decode; prompts are apart and flagged; a step that verified one length and drafted another teaches
no time. The steps come from a scheduler with vLLM's interface, and from the real one as it was recorded.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from speclen.integrations.vllm.steering import Steering
from speclen.integrations.vllm.steps import StepTracker, Traits
from speclen.records import Arm, Limits, StepFlag
from speclen.worker.drafting.arm_chooser import ArmChoice
from tests.support import fake_vllm

RECORDED = Path(__file__).parents[1] / "data" / "vllm_steps.jsonl"


class Control:
    """Lengths by batch size as a test says; keeps the reports."""

    def __init__(self, lengths):
        self.lengths = lengths
        self.probes = []
        self.asked, self.reports = [], []
        self.card = SimpleNamespace(limits=Limits(8, 5))

    def choose(self, batch_size, with_prefill=False):
        self.asked.append((batch_size, with_prefill))
        if self.probes and not with_prefill:
            return self.probes.pop()
        return ArmChoice(Arm(self.lengths(batch_size)), decision_version=3)

    def report(self, record):
        self.reports.append(record)


class EveryLength:
    """Follows the controller from its first word on."""

    def note(self, step):
        pass

    def choice(self, batch_size, wanted):
        return wanted


class Engine:
    """Steps a scheduler as vLLM's engine core does, with or without overlap; every row accepts `accepts` drafts."""

    def __init__(self, lengths, overlapped=False, traits=None):
        base = fake_vllm.AsyncScheduler if overlapped else fake_vllm.Scheduler
        control = self.control = Control(lengths)
        steering = self.steering = Steering(
            control,
            StepTracker(traits or Traits(overlapped=overlapped), ArmChoice(Arm(5))),
            EveryLength(),
            SimpleNamespace(stop=lambda: None),
        )
        engine = self

        class Scheduler(base):
            def _update_after_schedule(self, scheduler_output):
                steering.scheduled(scheduler_output, self.requests, bool(self.waiting), engine.started)
                super()._update_after_schedule(scheduler_output)

        self.scheduler = Scheduler(fake_vllm.config())
        self.overlapped = overlapped
        self.now = self.started = 0.0
        self.accepts = 1
        self.on_their_way = []

    def schedule(self):
        self.started = self.now
        self.on_their_way.append(self.scheduler.schedule())

    def end(self, took_s):
        output = self.on_their_way.pop(0)
        self.now += took_s
        rows = {}
        for name in output.num_scheduled_tokens:
            drafts = output.scheduled_spec_decode_tokens.get(name)
            request = self.scheduler.requests.get(name)
            in_prompt = request is not None and not drafts and request.num_computed_tokens < request.num_prompt_tokens
            rows[name] = None if in_prompt else min(self.accepts, len(drafts or ()))
        sampled = fake_vllm.sampled(rows)
        self.steering.arrived(output, self.scheduler.requests, self.now)
        self.scheduler.update_from_output(output, sampled)
        self.steering.finished(sampled, bool(self.scheduler.running))
        if not self.overlapped:
            self.scheduler.update_draft_token_ids(output)

    def step(self, took_s=0.01):
        if self.overlapped and not self.on_their_way:
            self.schedule()
        self.schedule()
        self.end(took_s)

    def results(self):
        return self.control.reports


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_steady_batch_teaches_its_length_and_its_time(overlapped):
    engine = Engine(lambda size: 2, overlapped)
    for name in "abc":
        engine.scheduler.add(name, 10)
    for _ in range(8):
        engine.step(0.02)
    last = engine.results()[-1]
    assert (last.batch_size, last.arm.speculation_length, last.accepted_histogram) == (3, 2, (0, 3, 0))
    assert last.latency_s == pytest.approx(0.02)
    assert last.flags == frozenset()
    assert last.decision_version == 3
    # The first step is a prompt alone, which is no decoding step; the next one is the first of its shape.
    assert engine.results()[0].flags - {StepFlag.OVERLAP} == {StepFlag.FIRST_USE}
    assert (StepFlag.OVERLAP in engine.results()[0].flags) is overlapped, "the step before it had no drafts"
    assert engine.steering.num_reported == len(engine.results())


def test_prompts_are_no_decoding_rows_and_flag_the_step():
    engine = Engine(lambda size: 2)
    engine.scheduler.add("a", 10)
    engine.step()
    engine.step()
    engine.scheduler.add("b", 100)  # two chunks
    engine.step()
    assert engine.results()[-1].batch_size == 1
    assert StepFlag.PREFILL in engine.results()[-1].flags
    assert engine.control.asked[-1] == (1, True), "the prompt is not done: one row decodes next, beside it"
    engine.step()
    assert (engine.results()[-1].batch_size, engine.control.asked[-1][0]) == (1, 2)
    assert StepFlag.PREFILL in engine.results()[-1].flags
    engine.step()
    assert (engine.results()[-1].batch_size, engine.results()[-1].accepted_histogram) == (2, (0, 2, 0))


@pytest.mark.parametrize(("overlapped", "num_changed"), [(False, {4: 1, 1: 0}), (True, {4: 2, 1: 2})])
def test_a_step_between_two_lengths_teaches_no_time(overlapped, num_changed):
    """One that verified four and drafted one; where steps overlap, also the one before and the two after it."""
    length = 4
    engine = Engine(lambda size: length, overlapped)
    engine.scheduler.add("a", 10)
    for _ in range(8):
        engine.step()
    length = 1
    for _ in range(8):
        engine.step()
    seen = [(r.arm.speculation_length, StepFlag.CHANGED_ARM in r.flags) for r in engine.results()[3:]]
    assert {each: seen.count((each, True)) for each in (4, 1)} == num_changed
    changed = [at for at, (_, is_changed) in enumerate(seen) if is_changed]
    assert changed == [*range(changed[0], changed[0] + len(changed))]
    assert {(4, False), (1, False)} <= {*seen}


def test_length_zero_is_plain_decoding():
    engine = Engine(lambda size: 0)
    engine.scheduler.add("a", 10)
    for _ in range(4):
        engine.step()
    last = engine.results()[-1]
    assert (last.arm.speculation_length, last.accepted_histogram, last.flags) == (0, (1,), frozenset())


def test_all_steps_of_a_probe_quote_it_and_all_but_its_first_are_usable():
    engine = Engine(lambda size: 2)
    engine.scheduler.add("a", 10)
    for _ in range(3):
        engine.step()
    engine.control.probes = [ArmChoice(Arm(4), 3, probe_id=9)] * 4
    for _ in range(7):
        engine.step()
    told = [(r.probe_id, r.arm.speculation_length, StepFlag.CHANGED_ARM in r.flags) for r in engine.results()]
    probed = [(9, 4, False), (9, 4, False), (9, 4, False), (9, 4, True)]
    assert told[-7:] == [(0, 2, True), *probed, (0, 2, False), (0, 2, False)]


def test_a_wait_for_requests_is_nobodys_time():
    engine = Engine(lambda size: 2)
    engine.scheduler.add("a", 10)
    for _ in range(4):
        engine.step()
    engine.scheduler.finish("a")
    engine.step()  # nothing to do, and nothing scheduled
    engine.now += 100.0
    engine.scheduler.add("b", 10)
    engine.step()
    engine.step(0.03)
    assert engine.results()[-1].latency_s == pytest.approx(0.03)


def test_rows_with_shorter_drafts_are_ordinary_for_ngrams_and_mixed_for_a_draft_model():
    for ragged in (True, False):
        engine = Engine(lambda size: 3, traits=Traits(ragged=ragged))
        for name in "ab":
            engine.scheduler.add(name, 10)
        for _ in range(3):
            engine.step()
        engine.scheduler.requests["a"].spec_token_ids = []  # nothing found
        engine.step()
        last = engine.results()[-1]
        assert (last.batch_size, last.arm.speculation_length, last.accepted_histogram) == (2, 3, (1, 1, 0, 0))
        assert (StepFlag.MIXED_LENGTHS in last.flags) is not ragged


def test_a_request_that_ends_while_its_step_is_under_way_changes_nothing_of_the_others():
    engine = Engine(lambda size: 2, overlapped=True)
    for name in "ab":
        engine.scheduler.add(name, 10)
    for _ in range(4):
        engine.step()
    engine.schedule()
    engine.scheduler.finish("a")
    engine.end(0.01)
    engine.end(0.01)
    assert engine.steering.tracker.num_odd == 0
    assert [r.batch_size for r in engine.results()[-2:]] == [2, 2]
    engine.step()
    assert engine.results()[-1].batch_size == 1


def test_a_step_without_tokens_leaves_those_under_way_alone():
    """It lost the steps behind it, whose reports then never came."""
    engine = Engine(lambda size: 2, overlapped=True)
    engine.schedule()  # nothing to do yet
    engine.scheduler.add("a", 10)
    engine.schedule()
    engine.end(0.01)
    for _ in range(4):
        engine.schedule()
        engine.end(0.01)
    assert [r.batch_size for r in engine.results()] == [1, 1, 1]


def test_rows_that_do_not_add_up_are_not_reported():
    engine = Engine(lambda size: 2)
    engine.scheduler.add("a", 10)
    for _ in range(3):
        engine.step()
    before = len(engine.results())
    engine.accepts = 1
    engine.schedule()
    output = engine.on_their_way.pop()
    engine.steering.arrived(output, engine.scheduler.requests, 1.0)
    engine.steering.finished(fake_vllm.sampled({"a": 6}), True)
    assert (len(engine.results()), engine.steering.tracker.num_odd) == (before, 1)


def test_what_an_engine_gives_up_is_not_kept():
    engine = Engine(lambda size: 2)
    engine.scheduler.add("a", 10)
    for _ in range(500):
        engine.schedule()
    assert len(engine.steering.tracker._pending) <= 64


def recorded_runs():
    """By run of the real scheduler: its steps as `scripts/vllm/record.py` wrote them."""
    runs = {}
    for line in RECORDED.read_text().splitlines():
        step = json.loads(line)
        runs.setdefault(step["run"], []).append(step)
    return runs


@pytest.mark.parametrize("run", ["draft_model", "ngram"])
def test_recorded_steps_of_the_real_scheduler_read_as_they_were(run):
    """A record of vLLM's steps is read as the steps were while it ran, and all of it adds up."""
    steps = recorded_runs()[run]
    tracker = StepTracker(Traits(ragged=run == "ngram"), ArmChoice(Arm(5)))
    num_read = 0
    for step in steps:
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in step["new"]],
            scheduled_cached_reqs=SimpleNamespace(
                resumed_req_ids=set(step["resumed"]), num_computed_tokens=step["contexts"]
            ),
            num_scheduled_tokens=step["tokens"],
            scheduled_spec_decode_tokens={name: [0] * n for name, n in step["drafts"].items()},
            num_invalid_spec_tokens=None,
        )
        requests = {name: fake_vllm.Request(name, 1, **values) for name, values in step["requests"].items()}
        pending = tracker.scheduled(output, requests, step["started"])
        if pending is not None:
            tracker.drafts(pending, ArmChoice(Arm(step["drafting"])))
        rows = SimpleNamespace(
            sampled_token_ids=[[0] * n for n in step["sampled"].values()],
            req_id_to_index={name: i for i, name in enumerate(step["sampled"])},
        )
        tracker.arrived(output, requests, step["ended"])
        found = tracker.finished(rows, step["busy"])
        decoding = [name for name in step["tokens"] if name not in step["in_prompt"]]
        assert (found is not None) == bool(decoding)
        if found is None:
            continue
        num_read += 1
        result = found
        assert result.batch_size == len(decoding)
        accepted = sum(run * rows for run, rows in enumerate(result.accepted_histogram))
        assert accepted == sum(max(step["sampled"][name] - 1, 0) for name in decoding)
        assert (StepFlag.PREFILL in result.flags) == bool(step["in_prompt"])
        assert result.latency_s > 0
        drafts = [len(ids) for ids in output.scheduled_spec_decode_tokens.values()]
        assert result.num_verified_tokens == len(decoding) + sum(drafts)
        assert result.num_drafted_sequences == sum(number > 0 for number in drafts)
    assert num_read > 50
    assert tracker.num_odd == 0
