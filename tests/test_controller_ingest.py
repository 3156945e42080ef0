"""A report is learned from whole or refused alone, with a sentence; the fast check and the explaining one agree."""

import json
import math

import pytest
from control_fakes import report
from hypothesis import given
from hypothesis import strategies as st

from speclen.controller.estimator.core import Limits, StepObservation
from speclen.controller.wire import ingest
from speclen.controller.wire.flags import named_flags
from speclen.controller.wire.ingest import Group, Origin, read_reports
from speclen.controller.wire.validation import MAX_INTEGER, explain_report
from speclen.v1 import control_pb2 as pb

LIMITS = Limits(max_batch_size=32, max_speculation_length=4)
ORIGIN = Origin(context_id=3, worker_key=5, epoch=7, received_at=11.0)


def read(*reports: pb.StepReport) -> tuple[Group, list[str]]:
    group = Group()
    refusals = read_reports(reports, LIMITS, ORIGIN, group)
    return group, [str(refusal) for refusal in refusals]


def test_a_report_becomes_an_observation_and_a_row():
    group, refusals = read(report(9, decision_version=13, probe_id=17))
    assert refusals == []
    assert group.observations == [StepObservation(4, 2, 0.02, (1, 2, 1), 100.0)]
    *head, text, num_accepted, context, version, probe, flags, at, by_class = group.rows[0][:-5]
    assert head == [3, 5, 7, 9, 4, 2, 0.02]
    assert json.loads(text) == [1, 2, 1]
    assert (num_accepted, context, version, probe, flags, at, by_class) == (4, 100.0, 13, 17, "", 11.0, None)
    assert group.rows[0][-5:] == (1, None, None, 0.0, 0)


def test_a_step_at_length_zero_is_ordinary():
    group, refusals = read(report(1, speculation_length=0, accepted_histogram=[4]))
    assert refusals == []
    assert json.loads(group.rows[0][7]) == [4]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("seq", [0, MAX_INTEGER + 1]),
        ("batch_size", [0, 33, 2**32 - 1]),
        ("speculation_length", [1, 3, 5, 64, 2**32 - 1]),
        ("latency_s", [math.nan, math.inf, -math.inf, 0.0, 9.9e-7, -1e-9, 3600.1, 86400.0]),
        ("accepted_histogram", [[], [4], [1, 2], [1, 2, 2], [1, 2, 1, 0], [0] * 1000, [2**32 - 1, 5, 0]]),
        ("mean_context_length", [math.nan, math.inf, -1.0, 1e9]),
        ("draft_prompt_s", [math.nan, math.inf, -1e-9, 3600.1]),
        ("num_new_rows", [33, 2**32 - 1]),
        ("decision_version", [MAX_INTEGER + 1]),
        ("probe_id", [2**64 - 1]),
    ],
)
def test_what_is_not_plausible_is_refused_by_name_and_alone(field, values):
    for value in values:
        group, refusals = read(report(1), report(**{"seq": 2, field: value}), report(3))
        assert [row[3] for row in group.rows] == [1, 3], f"{field} = {value}"
        assert len(group.observations) == 2
        assert len(refusals) == 1
        named = "accepted_histogram" if field == "speculation_length" and value < 5 else field
        assert named in refusals[0]
        assert "must" in refusals[0] or "a step of length" in refusals[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"latency_s": 3600.0},
        {"latency_s": 1e-6},
        {"batch_size": 32, "accepted_histogram": [32, 0, 0]},
        {"mean_context_length": 0.0},
        {"seq": MAX_INTEGER, "decision_version": MAX_INTEGER, "probe_id": MAX_INTEGER},
        {"speculation_length": 4, "accepted_histogram": [0, 0, 0, 0, 4]},
    ],
)
def test_every_limit_itself_is_allowed(changes):
    assert read(report(**{"seq": 1, **changes}))[1] == []


numbers = st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 2**32 - 1))
seconds = st.one_of(st.floats(), st.floats(0.001, 1.0))


@given(
    st.builds(
        pb.StepReport,
        seq=st.one_of(st.integers(1, 100), st.integers(0, 2**64 - 1)),
        batch_size=numbers,
        speculation_length=numbers,
        latency_s=seconds,
        accepted_histogram=st.lists(numbers, max_size=6),
        mean_context_length=seconds,
        decision_version=st.integers(0, 2**64 - 1),
        probe_id=st.integers(0, 2**64 - 1),
        draft_prompt_s=st.one_of(st.just(0.0), st.floats()),
        num_new_rows=st.one_of(st.just(0), st.integers(0, 2**32 - 1)),
        flags=st.lists(st.integers(0, 10), max_size=3),
    )
)
def test_the_fast_check_and_the_one_that_explains_agree(message):
    group, refusals = read(message)
    assert bool(refusals) == (explain_report(message, LIMITS) is not None)
    assert len(group.rows) == len(group.observations) == 1 - len(refusals)


@pytest.mark.parametrize(
    ("flags", "names", "latency", "acceptance"),
    [
        ([], "", True, True),
        ([pb.STEP_FLAG_FIRST_USE], "first_use", False, True),
        ([pb.STEP_FLAG_COMPILATION], "compilation", False, True),
        ([pb.STEP_FLAG_PREFILL, pb.STEP_FLAG_PREFILL], "prefill", False, True),
        ([pb.STEP_FLAG_CATCH_UP], "catch_up", False, True),
        ([pb.STEP_FLAG_MIXED_LENGTHS, pb.STEP_FLAG_PREFILL], "mixed_lengths prefill", False, False),
        ([pb.STEP_FLAG_CHANGED_LENGTH], "changed_length", False, True),
        ([99], "unknown", False, False),
        ([pb.STEP_FLAG_UNSPECIFIED], "unknown", False, False),
    ],
)
def test_flags_say_what_a_step_may_teach(flags, names, latency, acceptance):
    group, _ = read(report(1, flags=flags))
    observation = group.observations[0]
    assert (observation.teaches_latency, observation.teaches_acceptance) == (latency, acceptance)
    assert group.rows[0][12] == names
    meaning = named_flags(names)
    assert (meaning.teaches_latency, meaning.teaches_acceptance) == (latency, acceptance), "a replay reads the same"


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(ingest, "MAX_REMEMBERED", 10)
    for rows in range(1, 31):
        read(report(rows, batch_size=rows, accepted_histogram=[rows, 0, 0]))
    assert len(ingest._histograms) <= 10
    for flag in range(100, 200):
        read(report(1, flags=[flag]))
    assert len(ingest._flags) < 50, "unknown flags are without number"
