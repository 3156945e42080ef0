"""What copying did in a step, and what was read: from the message to the estimator's values, to text, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable

from speclen.controller.estimator.plans.plan import MAX_COPIED, MAX_MATCH, CopiedRun, Copies, Plan
from speclen.controller.wire.flags import Flags
from speclen.controller.wire.validation import MAX_LENGTH, InvalidMessageError, check_range
from speclen.v1 import control_pb2 as pb

# Tokens of one match length that one report may tell: more than all rows of a worker put out in a window of a minute.
MOST_READ = 2**20

Read = tuple[tuple[int, int, int], ...]  # match, tokens, right ones


def copies_of(report: pb.StepReport, flags: Flags) -> tuple[Copies | None, Read, str | None] | InvalidMessageError:
    """What copying may teach, None where other flags forbid it; what was read; all of it as JSON text; or why not."""
    try:
        read = _read(report)
        if not report.HasField("copying"):
            return None, read, _text(None, read) if read else None
        copies = _copies(report, flags)
    except InvalidMessageError as error:
        return InvalidMessageError(error.reason, f"report {report.seq}: {error}")
    return copies if flags.copies_teach else None, read, _text(copies, read)


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


def _text(copies: Copies | None, read: Read) -> str:
    told: dict[str, object] = {}
    if copies is not None:
        plan = [*copies.plan[:3], int(copies.plan.draft_after_copy)]
        told = {"plan": plan, "searched": copies.num_searched_rows, "drafting": copies.num_drafting_rows}
        told |= {"verified": copies.num_verified_tokens, "runs": copies.runs}
    return json.dumps(told | ({"read": read} if read else {}), separators=(",", ":"))


def stored_copies(text: str | None, flags: Flags) -> tuple[Copies | None, Read]:
    """What a stored report may teach of copying, and what was read.

    KeyError, TypeError or ValueError for a text that is none of ours.
    """
    if text is None:
        return None, ()
    told = json.loads(text)
    read = tuple((match, tokens, right) for match, tokens, right in told.get("read", ()))
    if not flags.copies_teach or "plan" not in told:
        return None, read
    copies = Copies(
        plan_of(told["plan"]),
        *(told["searched"], told["drafting"], told["verified"]),
        runs=tuple(CopiedRun(*run) for run in told["runs"]),
        teaches_latency=flags.copies_teach_latency,
    )
    return copies, read


def plan_of(numbers: Iterable[int]) -> Plan:
    """Of a list [draft_length, copy_min_match, copy_max_tokens, draft_after_copy]."""
    drafted, match, most, after = numbers
    return Plan(drafted, match, most, bool(after))
