"""Says whether what a worker or an operator sent is plausible, and in one sentence why not.

NaN and infinities survive protobuf, unknown enum values do too, and a single absurd number would teach the estimator
nonsense for hours: so every field is checked here, before anything is learned. Knows protobuf messages, not gRPC.
"""

from __future__ import annotations

import math
from itertools import pairwise

from speclen.controller.estimator.core import ContextKey, Limits, Profile, ProfileCell
from speclen.controller.estimator.plans.plan import MAX_COPIED
from speclen.controller.wire.flags import Flags, named_flags
from speclen.v1 import control_pb2 as pb

MAX_INTEGER = 2**63 - 1  # what SQLite can hold
# Of a step, in seconds: no device takes less, and no step more.
MIN_LATENCY_S = 1e-6
MAX_LATENCY_S = 3600.0
MAX_CONTEXT_LENGTH = 999_999_999.0  # tokens
MAX_BATCH_SIZE = 4096
MAX_LENGTH = 64
MAX_PROBE_STEPS = 4
MAX_REPORTS = 1024  # reports in one message
MAX_CELLS = MAX_BATCH_SIZE * 4  # cells of one profile
MAX_SENTENCE = 600  # characters of a refusal, which may quote what it refuses


class InvalidMessageError(ValueError):
    """A message cannot be used. The sentence names field, value and range; `reason` is a word for the metrics."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence if len(sentence) <= MAX_SENTENCE else f"{sentence[: MAX_SENTENCE - 4]} ...")
        self.reason = reason


FLAG_NAMES = {
    pb.STEP_FLAG_FIRST_USE: "first_use",
    pb.STEP_FLAG_COMPILATION: "compilation",
    pb.STEP_FLAG_PREFILL: "prefill",
    pb.STEP_FLAG_CATCH_UP: "catch_up",
    pb.STEP_FLAG_MIXED_LENGTHS: "mixed_lengths",
    pb.STEP_FLAG_COPIED: "copied",
    pb.STEP_FLAG_CHANGED_LENGTH: "changed_length",
}


def read_flags(flags: frozenset[int]) -> Flags:
    """The meaning of the flags of one report."""
    return named_flags(" ".join(sorted({FLAG_NAMES.get(flag, "unknown") for flag in flags})))  # type: ignore[call-overload]


def check_text(name: str, value: str, minimum: int, maximum: int) -> str:
    """The value, if it has minimum to maximum characters and can be printed."""
    if not minimum <= len(value) <= maximum:
        raise InvalidMessageError(name, f"{name} has {len(value)} characters; it must have {minimum} to {maximum}")
    if not value.isprintable():
        raise InvalidMessageError(name, f"{name} is {value!r}; it must not hold control characters")
    return value


def check_range(name: str, value: float, minimum: float, maximum: float) -> None:
    """NaN is in no range."""
    if not minimum <= value <= maximum:
        raise InvalidMessageError(name, f"{name} is {value:g}; it must be {minimum:g} to {maximum:g}")


def check_duration(name: str, value: float) -> None:
    if not MIN_LATENCY_S <= value <= MAX_LATENCY_S:
        raise InvalidMessageError(
            name, f"{name} is {value:g}; it must be {MIN_LATENCY_S:g} to {MAX_LATENCY_S:g} seconds"
        )


def check_identity(identity: pb.WorkerIdentity) -> None:
    check_text("worker.worker_id", identity.worker_id, 1, 128)
    if not 1 <= identity.epoch <= MAX_INTEGER:
        raise InvalidMessageError(
            "worker.epoch", f"worker.epoch is {identity.epoch}; it must be 1 to {MAX_INTEGER}, growing with every start"
        )


def read_context(message: pb.ContextKey) -> ContextKey:
    """Raises InvalidMessageError; the draft may be empty (a worker without one), the fingerprint too."""
    return ContextKey(
        target=check_text("context.target", message.target, 1, 256),
        draft=check_text("context.draft", message.draft, 0, 256),
        device=check_text("context.device", message.device, 1, 256),
        dtype=check_text("context.dtype", message.dtype, 1, 32),
        engine_fingerprint=check_text("context.engine_fingerprint", message.engine_fingerprint, 0, 256),
    )


def read_limits(message: pb.WorkerLimits) -> Limits:
    check_range("limits.max_batch_size", message.max_batch_size, 1, MAX_BATCH_SIZE)
    check_range("limits.max_speculation_length", message.max_speculation_length, 0, MAX_LENGTH)
    check_range("limits.max_copied_tokens", message.max_copied_tokens, 0, MAX_COPIED)
    return Limits(message.max_batch_size, message.max_speculation_length, message.max_copied_tokens)


def read_probe_steps(message: pb.WorkerLimits) -> int:
    check_range("limits.probe_steps", message.probe_steps, 0, MAX_PROBE_STEPS)
    return message.probe_steps or 1


def explain_report(report: pb.StepReport, limits: Limits) -> InvalidMessageError | None:
    """Why a report is refused; None for a good one. The slow, complete twin of the check in ingest.py."""
    try:
        check_report(report, limits)
    except InvalidMessageError as error:
        return InvalidMessageError(error.reason, f"report {report.seq}: {error}")
    return None


def check_report(report: pb.StepReport, limits: Limits) -> None:
    histogram = report.accepted_histogram
    if not 1 <= report.seq <= MAX_INTEGER:
        raise InvalidMessageError("seq", f"seq is {report.seq}; it must be 1 to {MAX_INTEGER}")
    check_range("batch_size", report.batch_size, 1, limits.max_batch_size)
    check_range("speculation_length", report.speculation_length, 0, limits.max_speculation_length)
    check_duration("latency_s", report.latency_s)
    check_range("mean_context_length", report.mean_context_length, 0, MAX_CONTEXT_LENGTH)
    check_range("draft_prompt_s", report.draft_prompt_s, 0, MAX_LATENCY_S)
    check_range("num_new_rows", report.num_new_rows, 0, limits.max_batch_size)
    if len(histogram) != report.speculation_length + 1:
        raise InvalidMessageError(
            "accepted_histogram",
            f"accepted_histogram has {len(histogram)} entries; a step of length {report.speculation_length} has "
            f"{report.speculation_length + 1}",
        )
    if sum(histogram) != report.batch_size:
        raise InvalidMessageError(
            "accepted_histogram",
            f"accepted_histogram sums to {sum(histogram)}; it must sum to batch_size, {report.batch_size}",
        )
    for name, value in (("decision_version", report.decision_version), ("probe_id", report.probe_id)):
        if value > MAX_INTEGER:
            raise InvalidMessageError(name, f"{name} is {value}; it must be 0 to {MAX_INTEGER}")


def read_profile(message: pb.ImportProfileRequest) -> Profile:
    """The profile, with every number checked. Raises InvalidMessageError."""
    if not 1 <= len(message.cells) <= MAX_CELLS:
        raise InvalidMessageError("cells", f"the profile has {len(message.cells)} cells; it must have 1 to {MAX_CELLS}")
    cells = tuple(read_cell(cell) for cell in message.cells)
    measured = {(cell.batch_size, cell.speculation_length) for cell in cells}
    if len(measured) != len(cells):
        raise InvalidMessageError("cells", "the profile has two cells of one batch size and length; it must have one")
    check_survival(list(message.survival), list(message.num_survival_rows))
    return Profile(
        cells=cells,
        survival=tuple(message.survival),
        num_survival_rows=tuple(message.num_survival_rows),
        as_prior=message.as_prior,
        source=check_text("source", message.source, 0, 256),
    )


def read_cell(cell: pb.ProfileCell) -> ProfileCell:
    check_range("cells.batch_size", cell.batch_size, 1, MAX_BATCH_SIZE)
    check_range("cells.speculation_length", cell.speculation_length, 0, MAX_LENGTH)
    check_duration("cells.step_s", cell.step_s)
    check_range("cells.step_s_stderr", cell.step_s_stderr, 0, MAX_LATENCY_S)
    check_range("cells.num_steps", cell.num_steps, 1, MAX_INTEGER)
    check_range("cells.mean_context_length", cell.mean_context_length, 0, MAX_CONTEXT_LENGTH)
    return ProfileCell(
        cell.batch_size,
        cell.speculation_length,
        cell.step_s,
        cell.step_s_stderr,
        cell.num_steps,
        cell.mean_context_length,
    )


def check_survival(survival: list[float], num_rows: list[int]) -> None:
    if len(survival) > MAX_LENGTH:
        raise InvalidMessageError(
            "survival", f"survival has {len(survival)} entries; it must have at most {MAX_LENGTH}"
        )
    if len(num_rows) != len(survival):
        raise InvalidMessageError(
            "num_survival_rows", f"num_survival_rows has {len(num_rows)} entries; survival has {len(survival)}"
        )
    for value in survival:
        if not (math.isfinite(value) and 0.0 <= value <= 1.0):
            raise InvalidMessageError("survival", f"survival holds {value:g}; entries must be 0 to 1")
    if any(later > earlier for earlier, later in pairwise(survival)):
        raise InvalidMessageError("survival", "survival grows with the position; it can only fall")
    if any(rows > MAX_INTEGER for rows in num_rows):
        raise InvalidMessageError("num_survival_rows", f"num_survival_rows must be at most {MAX_INTEGER}")


class OtherRunError(Exception):
    """A worker expects the controller of another run."""


def check_run(expected: str, own: pb.ServerIdentity) -> None:
    """Raises OtherRunError when somebody expects another run than this one; "" expects none."""
    if expected and expected != own.run_id:
        raise OtherRunError(
            f"this controller (process {own.process_id} on {own.host}, database {own.database or 'none'}) does not belong "
            f"to run {expected!r}: give the worker the address of its own with --controller"
        )
