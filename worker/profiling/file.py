"""Reads the step times and survival of a profile that `speclen profile export` wrote, for a worker without controller."""

from __future__ import annotations

import json
from pathlib import Path

from speclen.v1 import control_pb2 as pb
from speclen.worker.reporting.length_table import LengthTable, ProfiledStep, table_from_profile


def table_from_file(path: Path, max_batch_size: int, max_length: int) -> LengthTable:
    """The paper's table from a profile. Raises ValueError naming the file when it is not a profile."""
    try:
        content = json.loads(path.read_text("utf-8"))
        steps = [ProfiledStep(c["batch_size"], c["speculation_length"], c["step_s"]) for c in content["cells"]]
        survival = [float(value) for value in content["survival"]]
    except OSError as error:
        raise ValueError(f"cannot read the profile {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a profile: make one with `speclen profile run` ({error})") from error
    return table_from_profile(steps, survival, max_batch_size, max_length)


def foreign_parts(path: Path, context: pb.ContextKey) -> list[str]:
    """What of the context a profile was measured in differs from this worker's, in words; empty when it is the same.

    A file that does not name its context differs in that. The file is one that `table_from_file` could read.
    """
    theirs = json.loads(path.read_text("utf-8")).get("context")
    if not isinstance(theirs, dict):
        return ["it does not say where it was measured"]
    names = [field.name for field in pb.ContextKey.DESCRIPTOR.fields]
    return [
        f"{name} {theirs.get(name, '')!r} instead of {getattr(context, name)!r}"
        for name in names
        if theirs.get(name, "") != getattr(context, name)
    ]
