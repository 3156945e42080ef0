"""What copying did in a step, what was read and reviewed: from messages to the estimator's values, to text, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from speclen.controller.estimator.acceptance import NUM_CLASSES
from speclen.controller.estimator.plans.plan import MAX_COPIED, MAX_MATCH, CopiedRun, Copies, Plan
from speclen.controller.estimator.plans.reviews import OutputReview
from speclen.controller.wire.flags import Flags
from speclen.controller.wire.validation import MAX_LENGTH, InvalidMessageError, check_range
from speclen.v1 import control_pb2 as pb

# Tokens of one match length that one report may tell: more than all rows of a worker put out in a window of a minute.
MOST_READ = 2**20

# Outputs that one report may review, and their tokens.
MOST_REVIEWS, MOST_REVIEWED = 4, 1024

Read = tuple[tuple[int, int, int], ...]  # match, tokens, right ones
Reviews = tuple[OutputReview, ...]


class Told(NamedTuple):
    """What copying may teach, None where other flags forbid it; what was read, and reviewed; all of it as JSON text."""

    copies: Copies | None = None
    read: Read = ()
    reviews: Reviews = ()
    text: str | None = None


def told_by(report: pb.StepReport, flags: Flags) -> Told | InvalidMessageError:
    """What a report tells beside its step; or why not."""
    try:
        read, reviews = _read(report), _reviews(report)
        copies = _copies(report, flags) if report.HasField("copying") else None
    except InvalidMessageError as error:
        return InvalidMessageError(error.reason, f"report {report.seq}: {error}")
    return Told(copies if flags.copies_teach else None, read, reviews, _text(copies, read, reviews))


def _reviews(report: pb.StepReport) -> Reviews:
    if len(report.reviews) > MOST_REVIEWS:
        raise InvalidMessageError("reviews", f"reviews has {len(report.reviews)} entries; {MOST_REVIEWS} are allowed")
    return tuple(_review(each) for each in report.reviews)


def _review(review: pb.OutputReview) -> OutputReview:
    matches, proposed, copied, drafted = review.matches, review.proposed, review.copied, review.drafted
    check_range("reviews.request_class", review.request_class, 1, NUM_CLASSES)
    check_range("the number of tokens in reviews.matches", len(matches), 1, MOST_REVIEWED)
    if {len(proposed), len(copied), len(drafted) or len(matches)} != {len(matches)}:
        raise InvalidMessageError(
            "reviews", "matches, proposed, copied and drafted of a review must have as many bytes"
        )
    check_range("reviews.matches", max(matches), 0, MAX_MATCH)
    check_range("reviews.proposed", max(proposed), 0, MAX_COPIED)
    check_range("reviews.drafted", max(drafted, default=0), 0, 1)
    if any(right > most for right, most in zip(copied, proposed, strict=True)):
        raise InvalidMessageError("reviews", "reviews.copied has more tokens than reviews.proposed")
    whole = review.num_output_tokens
    if 0 < whole < len(matches):
        raise InvalidMessageError(
            "reviews", f"reviews.num_output_tokens is {whole}; {len(matches)} of them are in reviews.matches"
        )
    return OutputReview(review.request_class - 1, matches, proposed, copied, drafted, whole)


def _read(report: pb.StepReport) -> Read:
    told = report.read
    if len(told) > MAX_MATCH + 1:
        raise InvalidMessageError("read", f"read has {len(told)} entries for {MAX_MATCH + 1} lengths of a match")
    for each in told:
        check_range("read.match_length", each.match_length, 0, MAX_MATCH)
        check_range("read.num_tokens", each.num_tokens, 1, MOST_READ)
        check_range("read.num_right", each.num_right, 0, each.num_tokens if each.match_length else 0)
    lengths = [each.match_length for each in told]
    if len(set(lengths)) < len(lengths):
        raise InvalidMessageError("read", f"read has match lengths {lengths}; each may be there once")
    return tuple((each.match_length, each.num_tokens, each.num_right) for each in told)


def _copies(report: pb.StepReport, flags: Flags) -> Copies:
    message = report.copying
    if not flags.copied:
        raise InvalidMessageError("copying", "copying is set, but STEP_FLAG_COPIED is not")
    plan = Plan(
        message.plan.draft_length,
        message.plan.copy_min_match,
        message.plan.copy_max_tokens,
        message.plan.draft_after_copy,
    )
    check_range("copying.plan.draft_length", plan.draft_length, 0, MAX_LENGTH)
    check_range("copying.plan.copy_min_match", plan.copy_min_match, 1, MAX_MATCH)
    check_range("copying.plan.copy_max_tokens", plan.copy_max_tokens, 1, MAX_COPIED)
    rows = report.batch_size
    check_range("copying.num_searched_rows", message.num_searched_rows, 0, rows)
    check_range("copying.num_drafting_rows", message.num_drafting_rows, 0, rows)
    if len(message.runs) > rows:
        raise InvalidMessageError("copying.runs", f"copying.runs has {len(message.runs)} entries for {rows} rows")
    runs = tuple(CopiedRun(run.match_length, run.num_proposed, run.num_accepted, run.num_rows) for run in message.runs)
    for run in runs:
        check_range("copying.runs.match_length", run.match_length, plan.copy_min_match, MAX_MATCH)
        check_range("copying.runs.num_proposed", run.num_proposed, 1, plan.copy_max_tokens)
        check_range("copying.runs.num_accepted", run.num_accepted, 0, run.num_proposed)
        check_range("copying.runs.num_rows", run.num_rows, 1, rows)
    check_range("the sum of copying.runs.num_rows", sum(run.num_rows for run in runs), 0, message.num_searched_rows)
    # A rectangle around the longest proposal, rounded up, holds less than three times what all could propose.
    most = rows * (1 + 3 * (plan.copy_max_tokens + MAX_LENGTH))
    check_range("copying.num_verified_tokens", message.num_verified_tokens, rows, most)
    return Copies(
        *(plan, message.num_searched_rows, message.num_drafting_rows, message.num_verified_tokens, runs),
        teaches_latency=flags.copies_teach_latency,
    )


def _text(copies: Copies | None, read: Read, reviews: Reviews) -> str | None:
    told: dict[str, object] = {}
    if copies is not None:
        plan = [*copies.plan[:3], int(copies.plan.draft_after_copy)]
        told = {"plan": plan, "searched": copies.num_searched_rows, "drafting": copies.num_drafting_rows}
        told |= {"verified": copies.num_verified_tokens, "runs": copies.runs}
    if read:
        told["read"] = read
    if reviews:
        told["reviews"] = [[kind, *(each.hex() for each in texts), whole] for kind, *texts, whole in reviews]
    return json.dumps(told, separators=(",", ":")) if told else None


def stored_copies(text: str | None, flags: Flags) -> Told:
    """What a stored report tells beside its step.

    KeyError, TypeError or ValueError for a text that is none of ours.
    """
    if text is None:
        return Told()
    told = json.loads(text)
    read = tuple((match, tokens, right) for match, tokens, right in told.get("read", ()))
    reviews = tuple(_stored_review(*values) for values in told.get("reviews", ()))
    if not flags.copies_teach or "plan" not in told:
        return Told(None, read, reviews, text)
    copies = Copies(
        plan_of(told["plan"]),
        *(told["searched"], told["drafting"], told["verified"]),
        runs=tuple(CopiedRun(*run) for run in told["runs"]),
        teaches_latency=flags.copies_teach_latency,
    )
    return Told(copies, read, reviews, text)


def _stored_review(
    kind: int, matches: str, proposed: str, copied: str, drafted: str, num_output_tokens: int = 0
) -> OutputReview:
    told, right = (bytes.fromhex(matches), bytes.fromhex(proposed)), (bytes.fromhex(copied), bytes.fromhex(drafted))
    return OutputReview(kind, *told, *right, num_output_tokens)


def plan_of(numbers: Iterable[int]) -> Plan:
    """Of a list [draft_length, copy_min_match, copy_max_tokens, draft_after_copy]."""
    drafted, match, most, after = numbers
    return Plan(drafted, match, most, bool(after))
