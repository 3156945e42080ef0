"""Converts messages to validated values, and values to messages. `ingest` reads the reports of steps.

NaN and infinities survive protobuf. One absurd number could spoil an estimate for hours, so everything that workers and
operators send is validated here, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

from speclen.records import (
    MAX_BATCH_SIZE,
    MAX_SPECULATION_LENGTH,
    Arm,
    ArmEstimate,
    Choice,
    ContextKey,
    Hold,
    Limits,
    Probe,
    Profile,
    ProfileCell,
    Table,
)
from speclen.v1 import control_pb2 as pb

MAX_INTEGER = 2**63 - 1  # of SQLite
MIN_LATENCY_S, MAX_LATENCY_S = 1e-6, 3600.0  # of a step on any device
MAX_TOKENS = 999_999_999
MAX_PROBE_STEPS, USUAL_PROBE_STEPS = 16, 3
MAX_TRANSITION_STEPS = 8
MAX_HOLDS = 64
MAX_CELLS = MAX_BATCH_SIZE * 4  # of one profile
MAX_SENTENCE = 600  # characters of a refusal, which may quote what it refuses


class InvalidMessageError(ValueError):
    """A message cannot be used. The sentence names field, value and range; `reason` is a word for the metrics."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence if len(sentence) <= MAX_SENTENCE else f"{sentence[: MAX_SENTENCE - 4]} ...")
        self.reason = reason


class OtherRunError(Exception):
    """A worker expects the controller of another run."""


def check_text(name: str, value: str, minimum: int, maximum: int) -> str:
    """The value, if it has minimum to maximum printable characters. Raises InvalidMessageError."""
    if not minimum <= len(value) <= maximum:
        raise InvalidMessageError(name, f"{name} has {len(value)} characters; it must have {minimum} to {maximum}")
    if not value.isprintable():
        raise InvalidMessageError(name, f"{name} is {value!r}; it must not hold control characters")
    return value


def check_range(name: str, value: float, minimum: float, maximum: float) -> None:
    """Raise InvalidMessageError if the value is out of range or NaN."""
    if not minimum <= value <= maximum:
        raise out_of_range(name, value, minimum, maximum)


def out_of_range(name: str, value: float, minimum: float, maximum: float) -> InvalidMessageError:
    numbers = [f"{each:g}" if isinstance(each, float) else str(each) for each in (value, minimum, maximum)]
    return InvalidMessageError(name, "{} is {}; it must be {} to {}".format(name, *numbers))


def check_identity(identity: pb.WorkerIdentity) -> None:
    check_text("worker.worker_id", identity.worker_id, 1, 128)
    check_range("worker.epoch", identity.epoch, 1, MAX_INTEGER)


def check_run(expected: str, own: pb.ServerIdentity) -> None:
    """Raise OtherRunError if a worker expects another run than this one; "" expects none."""
    if expected and expected != own.run_id:
        raise OtherRunError(
            f"this controller (process {own.process_id} on {own.host}, database {own.database or 'none'}) does not belong "
            f"to run {expected!r}: give the worker the address of its own with --controller"
        )


def read_context(message: pb.ContextKey) -> ContextKey:
    """The context, validated. The draft may be empty (a worker without one), and so may the fingerprint."""
    return ContextKey(
        target=check_text("context.target", message.target, 1, 256),
        draft=check_text("context.draft", message.draft, 0, 256),
        device=check_text("context.device", message.device, 1, 256),
        dtype=check_text("context.dtype", message.dtype, 1, 32),
        engine_fingerprint=check_text("context.engine_fingerprint", message.engine_fingerprint, 0, 256),
    )


def read_limits(message: pb.WorkerLimits) -> Limits:
    check_range("limits.max_batch_size", message.max_batch_size, 1, MAX_BATCH_SIZE)
    check_range("limits.max_speculation_length", message.max_speculation_length, 0, MAX_SPECULATION_LENGTH)
    return Limits(message.max_batch_size, message.max_speculation_length, message.ngram)


def read_probe_steps(message: pb.WorkerLimits) -> int:
    check_range("limits.probe_steps", message.probe_steps, 0, MAX_PROBE_STEPS)
    return message.probe_steps or USUAL_PROBE_STEPS


def read_transition_steps(message: pb.WorkerLimits) -> int:
    check_range("limits.transition_steps", message.transition_steps, 0, MAX_TRANSITION_STEPS)
    return message.transition_steps


def read_baseline(choices: Sequence[pb.Choice], limits: Limits) -> tuple[Choice, ...]:
    """Arms by batch range, from 1 on without gaps; () if there are none. Raises InvalidMessageError."""
    check_range("the number of entries of baseline", len(choices), 0, MAX_BATCH_SIZE)
    found, largest = [], 0
    for one in choices:
        arm = Arm(one.speculation_length, one.ngram)
        if one.batch_min != largest + 1 or one.batch_max < one.batch_min:
            sentence = (
                f"baseline has the range {one.batch_min}-{one.batch_max} after batch size {largest}: leave no gaps"
            )
            raise InvalidMessageError("baseline", sentence)
        if arm != arm.within(limits):
            raise InvalidMessageError("baseline", f"baseline has the arm `{arm}`, which is beyond the worker's limits")
        largest = one.batch_max
        found.append(Choice(one.batch_min, one.batch_max, arm))
    return tuple(found)


def read_hold(message: pb.Hold, limits: Limits) -> Hold:
    """A hold, validated. Raises InvalidMessageError if its range or arm is beyond the limits of the context."""
    arm = None if message.is_baseline else Arm(message.speculation_length, message.ngram)
    hold = Hold(message.batch_min, message.batch_max, arm)
    if reason := hold.reason_against(limits):
        raise InvalidMessageError("holds", reason)
    return hold


def read_profile(message: pb.ImportProfileRequest) -> Profile:
    """A profile with every number validated. Raises InvalidMessageError."""
    if not 1 <= len(message.cells) <= MAX_CELLS:
        raise InvalidMessageError("cells", f"the profile has {len(message.cells)} cells; it must have 1 to {MAX_CELLS}")
    cells = tuple(map(_read_cell, message.cells))
    if len({(cell.batch_size, cell.speculation_length) for cell in cells}) != len(cells):
        raise InvalidMessageError("cells", "the profile has two cells of one batch size and length; it must have one")
    _check_survival(message.survival, message.num_survival_rows)
    return Profile(
        cells=cells,
        survival=tuple(message.survival),
        num_survival_rows=tuple(message.num_survival_rows),
        source=check_text("source", message.source, 0, 256),
    )


def _read_cell(message: pb.ProfileCell) -> ProfileCell:
    cell = ProfileCell(*(getattr(message, name) for name in ProfileCell._fields))
    check_range("cells.batch_size", cell.batch_size, 1, MAX_BATCH_SIZE)
    check_range("cells.speculation_length", cell.speculation_length, 0, MAX_SPECULATION_LENGTH)
    check_range("cells.step_s", cell.step_s, MIN_LATENCY_S, MAX_LATENCY_S)
    check_range("cells.step_s_stderr", cell.step_s_stderr, 0.0, MAX_LATENCY_S)
    check_range("cells.num_steps", cell.num_steps, 1, MAX_INTEGER)
    check_range("cells.mean_context_length", cell.mean_context_length, 0, MAX_TOKENS)
    return cell


def _check_survival(survival: Sequence[float], num_rows: Sequence[int]) -> None:
    check_range("the number of entries of survival", len(survival), 0, MAX_SPECULATION_LENGTH)
    if len(num_rows) != len(survival):
        raise InvalidMessageError(
            "num_survival_rows", f"num_survival_rows has {len(num_rows)} entries; survival has {len(survival)}"
        )
    for value, rows in zip(survival, num_rows, strict=True):
        check_range("survival", value, 0.0, 1.0)
        check_range("num_survival_rows", rows, 0, MAX_INTEGER)
    for earlier, later in pairwise(survival):
        if later > earlier:
            raise InvalidMessageError("survival", f"survival grows from {earlier:g} to {later:g}; it must not grow")


def table_message(table: Table, limits: Limits) -> pb.Table:
    """The table with arms that a worker with these limits can run. Ranges joined for one arm have no expected time."""
    choices = []
    for arm, members in groupby(table.choices, lambda choice: choice.arm.within(limits)):
        first, *others = members
        choices.append(
            pb.Choice(
                batch_min=first.batch_min,
                batch_max=others[-1].batch_max if others else first.batch_max,
                ms_per_token=None if others else first.ms_per_token,
                **arm._asdict(),
            )
        )
    return pb.Table(decision_version=table.version, choices=choices)


def probe_message(probe: Probe, valid_for_s: float) -> pb.Probe:
    values = probe._asdict()
    return pb.Probe(**values.pop("arm")._asdict(), **values, valid_for_s=valid_for_s)


def learned_table_message(key: ContextKey, version: int, rows: Iterable[ArmEstimate]) -> pb.LearnedTable:
    context = pb.ContextKey(**key._asdict())
    return pb.LearnedTable(context=context, decision_version=version, rows=map(learned_row_message, rows))


def learned_row_message(row: ArmEstimate) -> pb.LearnedRow:
    values = row._asdict()
    arm, step_s, observed_s = (values.pop(name) for name in ("arm", "step_s", "observed_step_s"))
    observed_ms = None if observed_s is None else 1e3 * observed_s
    return pb.LearnedRow(**arm._asdict(), **values, step_ms=1e3 * step_s, observed_step_ms=observed_ms)
