"""Arms from the step times and survival of a profile by `speclen profile export`, for a worker without controller."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from speclen.records import Arm, Choice, ContextKey, Limits, ProfileCell
from speclen.v1 import control_pb2 as pb
from speclen.worker.reporting.table import ArmTable


def table_from_file(path: Path, limits: Limits) -> ArmTable:
    """The paper's table from a profile. Raises ValueError naming the file when it is not a profile."""
    try:
        content = json.loads(path.read_text("utf-8"))
        cells = [ProfileCell(c["batch_size"], c["speculation_length"], c["step_s"]) for c in content["cells"]]
        survival = [float(value) for value in content["survival"]]
    except OSError as error:
        raise ValueError(f"cannot read the profile {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a profile: make one with `speclen profile run` ({error})") from error
    return table_from_profile(cells, survival, limits)


def table_from_profile(cells: Sequence[ProfileCell], survival: Sequence[float], limits: Limits) -> ArmTable:
    """The paper's table: per profiled batch size the length with the least time per token, frozen.

    A batch size between two profiled ones uses the larger one's length, as in the paper's look-up.
    survival[i]: probability that draft tokens 0..i are all accepted. Raises ValueError for an empty profile.
    """
    if not cells:
        raise ValueError("the profile has no cells")
    expected = list(accumulate(survival, initial=1.0))
    longest = min(limits.max_speculation_length, len(survival))
    choices: list[Choice] = []
    sizes = sorted({cell.batch_size for cell in cells if cell.speculation_length <= longest})
    for low, size in zip([1, *(size + 1 for size in sizes)], sizes, strict=False):
        allowed = [cell for cell in cells if cell.batch_size == size and cell.speculation_length <= longest]
        best = min(allowed, key=lambda cell: cell.step_s / expected[cell.speculation_length])
        high = limits.max_batch_size if size == sizes[-1] else size
        choices.append(Choice(low, high, Arm(best.speculation_length)))
    return ArmTable.of(choices, limits, "profile")


def foreign_parts(path: Path, context: pb.ContextKey) -> list[str]:
    """Differences between a profile's context and this worker's, in words; empty without any.

    A file without a context differs. It must be one that `table_from_file` accepts.
    """
    theirs = json.loads(path.read_text("utf-8")).get("context")
    if not isinstance(theirs, dict):
        return ["it does not say where it was measured"]
    return [
        f"{name} {theirs.get(name, '')!r} instead of {getattr(context, name)!r}"
        for name in ContextKey._fields
        if theirs.get(name, "") != getattr(context, name)
    ]
