"""Between the worker's own values and the messages of the control stream."""

from __future__ import annotations

from speclen.v1 import control_pb2 as pb
from speclen.worker.drafting.plan import Plan
from speclen.worker.engine.length_chooser import CopyReport, LengthChoice, StepFlag, StepResult

FLAGS = {
    StepFlag.FIRST_USE: pb.STEP_FLAG_FIRST_USE,
    StepFlag.COMPILATION: pb.STEP_FLAG_COMPILATION,
    StepFlag.PREFILL: pb.STEP_FLAG_PREFILL,
    StepFlag.CATCH_UP: pb.STEP_FLAG_CATCH_UP,
    StepFlag.MIXED_LENGTHS: pb.STEP_FLAG_MIXED_LENGTHS,
    StepFlag.COPIED: pb.STEP_FLAG_COPIED,
    StepFlag.CHANGED_LENGTH: pb.STEP_FLAG_CHANGED_LENGTH,
}

# By request class of the worker: greedy, cool, hot.
CLASSES = (pb.REQUEST_CLASS_GREEDY, pb.REQUEST_CLASS_COOL, pb.REQUEST_CLASS_HOT)


def to_report(seq: int, choice: LengthChoice, result: StepResult) -> pb.StepReport:
    return pb.StepReport(
        seq=seq,
        batch_size=result.batch_size,
        speculation_length=result.speculation_length,
        latency_s=result.latency_s,
        accepted_histogram=result.accepted_histogram,
        mean_context_length=result.mean_context_length,
        decision_version=choice.decision_version,
        flags=[FLAGS[flag] for flag in result.flags],
        probe_id=choice.probe_id,
        draft_prompt_s=result.draft_prompt_s,
        num_new_rows=result.num_new_rows,
        copying=None if result.copying is None else to_copy_report(result.copying),
        class_histograms=[
            pb.ClassHistogram(request_class=CLASSES[kind], accepted_histogram=runs)
            for kind, runs in result.class_histograms
        ],
        read=[
            pb.ReadTokens(match_length=match, num_tokens=tokens, num_right=right)
            for match, tokens, right in result.read
        ],
        reviews=[
            pb.OutputReview(
                request_class=CLASSES[review.request_class],
                **review.copies._asdict(),
                drafted=review.drafted,
                num_output_tokens=review.num_output_tokens,
            )
            for review in result.reviews
        ],
    )


def to_copy_report(copying: CopyReport) -> pb.CopyReport:
    return pb.CopyReport(
        plan=to_plan(copying.plan),
        num_searched_rows=copying.num_searched_rows,
        num_drafting_rows=copying.num_drafting_rows,
        num_verified_tokens=copying.num_verified_tokens,
        runs=[
            pb.CopiedRun(
                match_length=run.match_length,
                num_proposed=run.num_proposed,
                num_accepted=run.num_accepted,
                num_rows=run.num_rows,
            )
            for run in copying.runs
        ],
    )


def to_plan(plan: Plan) -> pb.Plan:
    return pb.Plan(
        draft_length=plan.draft_length,
        copy_min_match=plan.copy_min_match,
        copy_max_tokens=plan.copy_max_tokens,
        draft_after_copy=plan.draft_after_copy,
    )


def plan_of(message: pb.BucketChoice | pb.Probe) -> Plan | None:
    """The plan that came with a choice or a probe; None where the length is all. Raises ValueError naming the value."""
    if not message.HasField("plan"):
        return None
    plan = message.plan
    return Plan(plan.draft_length, plan.copy_min_match, plan.copy_max_tokens, plan.draft_after_copy)
