"""Plans between worker and controller, either of which may be of the version before: that one has no fields from 30 on."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from structlog.testing import capture_logs
from test_control_client import MAX_BATCH, MAX_LENGTH, QUICK, FakeController, card, start, until
from test_controller_ingest import read

from speclen.controller.estimator.core import Bucket, Choice, Limits, Table
from speclen.controller.estimator.plans import plan as controller_plan
from speclen.controller.wire.flags import named_flags
from speclen.controller.wire.messages import table_message
from speclen.controller.wire.stored import observation_of
from speclen.controller.wire.validation import FLAG_NAMES, read_flags
from speclen.store.records import ReportRow
from speclen.v1 import control_pb2 as pb
from speclen.worker.drafting.plan import COPYING, Plan
from speclen.worker.engine.length_chooser import CopiedRun, CopyReport, LengthChoice, StepFlag, StepResult
from speclen.worker.reporting.control_client import ControlClient
from speclen.worker.reporting.length_table import LengthTable
from speclen.worker.reporting.messages import plan_of, to_plan, to_report
from speclen.worker.reviewing.output import CopyReview, OutputReview

PLAN = Plan(2, 3, 8)
RUNS = (CopiedRun(3, 8, 2, 1), CopiedRun(16, 8, 8, 2))
COPIED = StepResult(
    5, 2, 0.01, (4, 0, 1), 100.0, frozenset({StepFlag.COPIED}), CopyReport(PLAN, 5, 2, 5 + 24 + 4, RUNS)
)


def previous_messages() -> dict[str, Any]:
    """The classes of the version before, made of today's without what came since."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    new_messages = {"Plan", "CopyReport", "CopiedRun"}
    kept = [message for message in file.message_type if message.name not in new_messages]
    for message in kept:
        fields = [field for field in message.field if field.number < 30]
        del message.field[:]
        message.field.extend(fields)
    del file.message_type[:]
    file.message_type.extend(kept)
    for enum in file.enum_type:
        values = [value for value in enum.value if value.number < 30]
        del enum.value[:]
        enum.value.extend(values)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return dict(message_factory.GetMessageClassesForFiles([file.name], pool))


OLD = previous_messages()


def old(name: str, message: Any) -> Any:
    """What the version before reads of a message."""
    return OLD[f"speclen.v1.{name}"].FromString(message.SerializeToString())


def test_a_report_says_what_copying_did() -> None:
    report = to_report(7, LengthChoice.of(PLAN, 3), COPIED)
    assert (report.speculation_length, list(report.accepted_histogram)) == (2, [4, 0, 1])
    assert report.copying.plan == to_plan(PLAN)
    assert [(run.match_length, run.num_proposed, run.num_accepted, run.num_rows) for run in report.copying.runs] == [
        (3, 8, 2, 1),
        (16, 8, 8, 2),
    ]
    assert report.copying.num_verified_tokens == 33
    assert not to_report(8, LengthChoice(2), StepResult(1, 2, 0.01, (1, 0, 0), 9.0)).HasField("copying")


def test_a_step_that_copied_teaches_copying_alone_also_once_it_was_stored() -> None:
    group, refusals = read(to_report(1, LengthChoice.of(PLAN), COPIED))
    assert refusals == []
    (observation,) = group.observations
    assert (observation.teaches_latency, observation.teaches_acceptance) == (False, False)
    assert observation.copying is not None
    assert str(observation.copying.plan) == "copy>=3 up to 8, else draft 2"
    assert observation.copying.runs == ((3, 8, 2, 1), (16, 8, 8, 2))
    stored = ReportRow(1, *group.rows[0])
    assert stored.flags == "copied"
    assert observation_of(stored) == observation


@pytest.mark.parametrize("copying", [COPIED.copying, None])
def test_what_was_read_is_learned_from_whatever_the_step_was_also_once_it_was_stored(
    copying: CopyReport | None,
) -> None:
    flags = frozenset({StepFlag.PREFILL}) | ({StepFlag.COPIED} if copying else frozenset())
    step = dataclasses.replace(COPIED, copying=copying, flags=flags, read=((0, 3, 0), (2, 4, 1), (16, 9, 9)))
    report = to_report(1, LengthChoice.of(PLAN) if copying else LengthChoice(2), step)
    group, refusals = read(report)
    assert refusals == []
    (observation,) = group.observations
    assert observation.read == step.read
    assert (observation.copying is not None) == (copying is not None)
    assert observation_of(ReportRow(1, *group.rows[0])) == observation
    # A controller of the version before does not know it.
    assert old("StepReport", report).batch_size == 5


@pytest.mark.parametrize(
    ("field", "counts"),
    [
        ("match_length", (17, 1, 0)),
        ("num_tokens", (3, 0, 0)),
        ("num_tokens", (3, 2**20 + 1, 0)),
        ("num_right", (3, 2, 3)),
        ("num_right", (0, 2, 1)),
    ],
)
def test_what_is_not_plausible_about_reading_is_refused_by_name(field: str, counts: tuple[int, int, int]) -> None:
    report = to_report(1, LengthChoice(2), dataclasses.replace(COPIED, copying=None, flags=frozenset(), read=(counts,)))
    group, refusals = read(report)
    assert group.observations == []
    assert f"read.{field}" in refusals[0]


def test_a_match_length_is_told_once() -> None:
    twice = dataclasses.replace(COPIED, copying=None, flags=frozenset(), read=((3, 1, 1), (3, 2, 1)))
    assert "each may be there once" in read(to_report(1, LengthChoice(2), twice))[1][0]


REVIEW = OutputReview(1, CopyReview(bytes([0, 3, 16]), bytes([0, 8, 2]), bytes([0, 8, 0])), bytes([1, 0, 1]), 7)


@pytest.mark.parametrize("copying", [COPIED.copying, None])
def test_what_was_reviewed_is_learned_from_also_once_it_was_stored(copying: CopyReport | None) -> None:
    flags = frozenset({StepFlag.COPIED}) if copying else frozenset()
    alone = REVIEW._replace(drafted=b"")
    step = dataclasses.replace(COPIED, copying=copying, flags=flags, reviews=(REVIEW, alone))
    report = to_report(1, LengthChoice.of(PLAN) if copying else LengthChoice(2), step)
    group, refusals = read(report)
    assert refusals == []
    (observation,) = group.observations
    assert [each.request_class for each in observation.reviews] == [1, 1]
    assert [each[1:] for each in observation.reviews] == [(*REVIEW.copies, each, 7) for each in (REVIEW.drafted, b"")]
    assert observation_of(ReportRow(1, *group.rows[0])) == observation
    # A controller of the version before does not know it.
    assert old("StepReport", report).batch_size == 5


@pytest.mark.parametrize(
    ("says", "changed"),
    [
        ("reviews.request_class", {"request_class": 0}),
        ("reviews.request_class", {"request_class": 4}),
        ("tokens in reviews.matches", {"matches": b"", "proposed": b"", "copied": b"", "drafted": b""}),
        ("tokens in reviews.matches", dict.fromkeys(("matches", "proposed", "copied", "drafted"), bytes(1025))),
        ("as many bytes", {"proposed": bytes(2)}),
        ("as many bytes", {"drafted": bytes(4)}),
        ("reviews.matches", {"matches": bytes([0, 17, 0])}),
        ("reviews.proposed", {"proposed": bytes([0, 65, 2])}),
        ("reviews.drafted", {"drafted": bytes([0, 2, 0])}),
        ("more tokens than reviews.proposed", {"copied": bytes([1, 8, 0])}),
        ("reviews.num_output_tokens is 2; 3", {"num_output_tokens": 2}),
    ],
)
def test_what_is_not_plausible_about_reviews_is_refused_by_name(says: str, changed: dict[str, Any]) -> None:
    step = dataclasses.replace(COPIED, copying=None, flags=frozenset(), reviews=(REVIEW,))
    report = to_report(1, LengthChoice(2), step)
    for name, value in changed.items():
        setattr(report.reviews[0], name, value)
    group, refusals = read(report)
    assert group.observations == []
    assert says in refusals[0]


def test_no_report_reviews_outputs_without_end() -> None:
    many = dataclasses.replace(COPIED, copying=None, flags=frozenset(), reviews=(REVIEW,) * 5)
    assert "4 are allowed" in read(to_report(1, LengthChoice(2), many))[1][0]


@pytest.mark.parametrize(
    ("flag", "teaches", "times"),
    [(StepFlag.FIRST_USE, True, False), (StepFlag.PREFILL, True, False), (StepFlag.MIXED_LENGTHS, False, False)],
)
def test_other_flags_hold_for_copies_too(flag: StepFlag, teaches: bool, times: bool) -> None:
    step = dataclasses.replace(COPIED, flags=COPIED.flags | {flag})
    group, _ = read(to_report(1, LengthChoice.of(PLAN), step))
    (observation,) = group.observations
    assert (observation.copying is not None) == teaches
    if observation.copying is not None:
        assert observation.copying.teaches_latency == times
    assert observation_of(ReportRow(1, *group.rows[0])) == observation


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("copy_min_match", {"plan": pb.Plan(copy_min_match=0, copy_max_tokens=8)}),
        ("copy_min_match", {"plan": pb.Plan(copy_min_match=17, copy_max_tokens=8)}),
        ("copy_max_tokens", {"plan": pb.Plan(copy_min_match=3, copy_max_tokens=65)}),
        ("draft_length", {"plan": pb.Plan(copy_min_match=3, copy_max_tokens=8, draft_length=65)}),
        ("num_searched_rows", {"num_searched_rows": 6}),
        ("num_drafting_rows", {"num_drafting_rows": 6}),
        ("num_verified_tokens", {"num_verified_tokens": 4}),
        ("num_verified_tokens", {"num_verified_tokens": 2**31}),
        ("match_length", {"runs": [pb.CopiedRun(match_length=2, num_proposed=4, num_accepted=1, num_rows=1)]}),
        ("num_proposed", {"runs": [pb.CopiedRun(match_length=3, num_proposed=9, num_accepted=1, num_rows=1)]}),
        ("num_accepted", {"runs": [pb.CopiedRun(match_length=3, num_proposed=4, num_accepted=5, num_rows=1)]}),
        ("num_rows", {"runs": [pb.CopiedRun(match_length=3, num_proposed=4, num_accepted=1, num_rows=0)]}),
        ("num_rows", {"runs": [pb.CopiedRun(match_length=3, num_proposed=4, num_accepted=1, num_rows=3)] * 2}),
        ("runs", {"runs": [pb.CopiedRun(match_length=3, num_proposed=4, num_accepted=1, num_rows=1)] * 6}),
    ],
)
def test_what_is_not_plausible_about_copies_is_refused_by_name(field: str, change: dict[str, Any]) -> None:
    report = to_report(1, LengthChoice.of(PLAN), COPIED)
    good = {each.name: value for each, value in report.copying.ListFields()}
    report.copying.CopyFrom(pb.CopyReport(**{**good, **change}))
    group, refusals = read(report)
    assert group.observations == []
    assert field in refusals[0]


def test_copies_without_their_flag_are_refused_since_the_step_would_teach_lengths() -> None:
    report = to_report(1, LengthChoice.of(PLAN), COPIED)
    del report.flags[:]
    assert "STEP_FLAG_COPIED" in read(report)[1][0]


def test_a_worker_gets_as_much_of_a_plan_as_it_can_run() -> None:
    bucket = Bucket(0, 1, 4)
    table = Table(3, (Choice(bucket, 5, 2.0, controller_plan.Plan(4, 3, 16)), Choice(Bucket(1, 5, 8), 3, 2.0)))
    able, other = table_message(table, Limits(8, 8, 16)), table_message(table, Limits(8, 4, 0))
    assert [str(plan_of(choice)) for choice in able.choices] == ["copy>=3 up to 16, else draft 4", "draft 3"]
    assert [choice.speculation_length for choice in able.choices] == [4, 3], (
        "what a worker that ignores plans would play"
    )
    assert [(choice.speculation_length, choice.HasField("plan")) for choice in other.choices] == [
        (4, False),
        (3, False),
    ]
    clamped = table_message(table, Limits(8, 2, 8)).choices[0]
    assert str(plan_of(clamped)) == "copy>=3 up to 8, else draft 2"


def test_plans_are_called_alike_on_both_sides() -> None:
    for plan in (Plan(), Plan(2), Plan(0, 3, 8), Plan(2, 3, 8), Plan(2, 3, 8, True)):
        twin = controller_plan.Plan(plan.draft_length, plan.copy_min_match, plan.copy_max_tokens, plan.draft_after_copy)
        assert str(twin) == str(plan)


def test_a_controller_of_the_version_before_takes_such_a_step_and_learns_nothing_of_it() -> None:
    report = old("StepReport", to_report(1, LengthChoice.of(PLAN), COPIED))
    assert sum(report.accepted_histogram) == report.batch_size
    assert len(report.accepted_histogram) == report.speculation_length + 1
    # There every flag without a name was "unknown", which teaches nothing.
    names = {FLAG_NAMES.get(flag, "unknown") if flag < 30 else "unknown" for flag in report.flags}
    meaning = named_flags(" ".join(names))
    assert (names, meaning.teaches_latency, meaning.teaches_acceptance) == ({"unknown"}, False, False)
    assert read_flags(frozenset({pb.STEP_FLAG_COPIED})).names == "copied"


def test_a_worker_of_the_version_before_reads_the_length_of_a_plan() -> None:
    choice = pb.BucketChoice(batch_min=1, batch_max=4, speculation_length=2, plan=to_plan(PLAN))
    assert old("BucketChoice", choice).speculation_length == 2
    assert old("Probe", pb.Probe(probe_id=1, speculation_length=2, plan=to_plan(PLAN))).speculation_length == 2


def test_reports_of_a_worker_of_the_version_before_are_as_they_were() -> None:
    report = OLD["speclen.v1.StepReport"](
        seq=1, batch_size=2, speculation_length=1, latency_s=0.01, accepted_histogram=[1, 1], mean_context_length=9
    )
    group, refusals = read(pb.StepReport.FromString(report.SerializeToString()))
    assert refusals == []
    assert group.observations[0].teaches_latency


class PlanningController(FakeController):
    """Sends a plan for every batch size."""

    def __init__(self, *choices: pb.BucketChoice) -> None:
        super().__init__()
        self.choices = choices

    async def RegisterWorker(self, request, context):  # noqa: N802
        self.limits = request.limits
        return pb.RegisterWorkerResponse(table=pb.LengthTable(decision_version=1, choices=self.choices))


def followed(controller: PlanningController, max_copied: int, without_draft: Plan | None = None) -> ControlClient:
    """A client that has followed the controller's table."""

    async def run() -> ControlClient:
        server, address = await start(controller)
        limits = card()
        limits = type(limits)(**{**{f: getattr(limits, f) for f in limits.__slots__}, "max_copied_tokens": max_copied})
        control = ControlClient(
            limits, LengthTable.constant(1, MAX_BATCH, "default"), True, QUICK, without_draft=without_draft
        )
        task = asyncio.create_task(control.run(address))
        try:
            await until(lambda: control.connected)
            await until(lambda: not controller.probes)
            # Answers come in their order: the first from here on follows the probes, or is theirs.
            sent = control.clock()
            await until(lambda: control._last_answer > sent)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.stop(None)
        return control

    return asyncio.run(run())


def whole(length: int, plan: Plan | None = None) -> pb.BucketChoice:
    message = None if plan is None else to_plan(plan)
    return pb.BucketChoice(batch_min=1, batch_max=MAX_BATCH, speculation_length=length, plan=message)


def test_a_worker_follows_plans_as_far_as_its_limits_go() -> None:
    controller = PlanningController(whole(60, Plan(60, 3, 60)))
    control = followed(controller, max_copied=6)
    assert controller.limits.max_copied_tokens == 6
    assert control.choice_for(3) == LengthChoice(MAX_LENGTH, 1, 0, Plan(MAX_LENGTH, 3, 6))
    assert control.table.lengths[3] == MAX_LENGTH
    assert followed(controller, max_copied=0).choice_for(3) == LengthChoice(MAX_LENGTH, 1)


def test_a_worker_without_a_draft_copies_where_the_controller_knows_no_plans() -> None:
    assert followed(PlanningController(whole(0)), 8, COPYING).choice_for(2) == LengthChoice(0, 1, 0, COPYING)
    plain = PlanningController(whole(0, Plan()))
    assert followed(plain, 8, COPYING).choice_for(2) == LengthChoice(0, 1)


def test_a_plan_that_is_none_leaves_the_table_as_it_was() -> None:
    bad = pb.BucketChoice(batch_min=1, batch_max=MAX_BATCH, plan=pb.Plan(copy_min_match=99, copy_max_tokens=8))
    with capture_logs() as logs:
        control = followed(PlanningController(bad), 8)
    assert control.choice_for(1) == LengthChoice(1, 0)
    assert any("99" in str(entry.get("reason")) for entry in logs)


@pytest.mark.parametrize(("plan", "used"), [(Plan(1, 3, 8), True), (Plan(1, 3, 9), False), (Plan(9, 3, 8), False)])
def test_probes_of_plans_are_used_once_and_within_the_limits(plan: Plan, used: bool) -> None:
    controller = PlanningController(whole(1))
    probe = pb.Probe(probe_id=5, batch_min=1, batch_max=4, speculation_length=plan.draft_length, valid_for_s=60)
    probe.plan.CopyFrom(to_plan(plan))
    controller.probes = [probe]
    control = followed(controller, max_copied=8)
    assert control.choice_for(2) == (LengthChoice(1, 1, 5, plan) if used else LengthChoice(1, 1))
    assert control.choice_for(2) == LengthChoice(1, 1)
