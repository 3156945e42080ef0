"""The machine and the program of a benchmark, so that its figures can be read later."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speclen.worker.models.devices import device_name, processor_model, processor_name

if TYPE_CHECKING:
    import torch


def machine(device: torch.device) -> dict[str, Any]:
    """Names and versions that figures depend on. load_average: processes that wanted a core in the last minute."""
    import torch  # only here: who asks for the commit alone does not wait for it

    return {
        "device": device_name(device),
        "processor": processor_name(),
        "processor_model": processor_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gomp_spincount": os.environ.get("GOMP_SPINCOUNT", ""),
        "load_average": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def provenance(program: str = "speclen") -> dict[str, Any]:
    """The command, the commit it ran at, and whether it was not exactly that commit; documents, results among them, aside.

    program: what is written before the arguments, since a script is not called `speclen`. commit, uncommitted_changes:
    None outside a checkout, for example in an installed package.
    """
    commit, uncommitted_changes = checkout_of(Path(__file__).resolve())
    return {
        "command": f"{program} {shlex.join(sys.argv[1:])}",
        "commit": commit,
        "uncommitted_changes": uncommitted_changes,
    }


@cache  # what runs was loaded at the start: a commit that is made while it measures is not its own
def checkout_of(file: Path) -> tuple[str | None, bool | None]:
    """Commit of the checkout that a file is part of, and whether tracked files outside docs/ differ from it."""
    if git(file.parent, "ls-files", "--error-unmatch", file.name) is None:  # installed inside somebody's repository
        return None, None
    changes = git(file.parent, "status", "--porcelain", "--untracked-files=no", "--", ":(top,exclude)docs")
    return git(file.parent, "rev-parse", "--short=12", "HEAD"), None if changes is None else bool(changes)


def git(folder: Path, *arguments: str) -> str | None:
    """Output of git there; None where it refuses or is not installed."""
    try:
        answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
