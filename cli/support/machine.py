"""Machine, versions and commit, recorded with every measurement."""

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

from speclen.worker.models.machine import device_name, processor_model, processor_name

if TYPE_CHECKING:
    import torch


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions that figures depend on. load_average: mean number of runnable processes in the last minute."""
    import torch  # imported here because `provenance` does not need it

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
    """Command, commit, and whether tracked files outside docs/ differ from the commit.

    program: the name of the command. commit, uncommitted_changes: None outside a checkout, as in an installed package.
    """
    commit, uncommitted_changes = checkout_of(Path(__file__).resolve())
    return {
        "command": f"{program} {shlex.join(sys.argv[1:])}",
        "commit": commit,
        "uncommitted_changes": uncommitted_changes,
    }


@cache  # the running code was loaded at the start; a commit made during the measurement is not its own
def checkout_of(file: Path) -> tuple[str | None, bool | None]:
    """Commit of the checkout that a file is part of, and whether tracked files outside docs/ differ from it."""
    if git(file.parent, "ls-files", "--error-unmatch", file.name) is None:  # installed inside an unrelated repository
        return None, None
    changes = git(file.parent, "status", "--porcelain", "--untracked-files=no", "--", ":(top,exclude)docs")
    return git(file.parent, "rev-parse", "--short=12", "HEAD"), None if changes is None else bool(changes)


def git(folder: Path, *arguments: str) -> str | None:
    """Output of git in a folder; None if it fails or is not installed."""
    try:
        answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
