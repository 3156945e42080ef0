"""The learned table as vLLM's own, by `speclen export`, and asked of vLLM's validator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from servers import MAX_BATCH

from speclen.bench.findings import Report

VALIDATE = """
import json, sys
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
given = json.loads(sys.argv[1])
table = given["num_speculative_tokens_per_batch_size"]
print(build_dynamic_sd_schedule_lookup(table, int(sys.argv[2]), given["num_speculative_tokens"])[1:])
"""


def exported(report: Report, database: Path, vllm_python: str) -> dict[str, Any]:
    """The output of `speclen export --format vllm`, as it goes into --speculative-config."""
    report.say("", "## `speclen export --format vllm`", "")
    command = [sys.executable, "-m", "speclen.cli.app", "export", "--format", "vllm", "--db", str(database)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    report.say("```", text, "```", "")
    done = subprocess.run(
        [vllm_python, "-c", VALIDATE, text, str(MAX_BATCH)], capture_output=True, text=True, check=False
    )
    accepted = done.returncode == 0
    report.check(accepted, "vLLM's own validator takes it" if accepted else done.stderr.strip().splitlines()[-1])
    table: dict[str, Any] = json.loads(text)
    return table
