"""Checks of the engine on this device, and its forward passes beside what the memory's bandwidth allows.

Needs torch, transformers and numpy, and nothing of this project's environment but its source.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from speclen.bench.engine.run import EngineBench
from speclen.bench.gpu.checks import run_checks
from speclen.bench.gpu.passes import PassTime, copy_bandwidth, time_pass, time_prompt
from speclen.cli.support.machine import machine, provenance
from speclen.worker.backends.torch.cached_model import CachedModel
from speclen.worker.backends.torch.recording import RerunRecorder
from speclen.worker.models.loading import load_pair

PROMPT_TOKENS = (10, 130, 250)  # of the prompts whose passes are timed
CONTEXT_TOKENS = 128  # that rows hold when a decoding pass is timed


@dataclass(frozen=True, slots=True)
class Sizes:
    """target, draft: the pair whose passes are timed. num_checked: requests of the checks, which the bundled pair serves."""

    target: str
    draft: str
    batch_sizes: tuple[int, ...]
    longest: int
    copied_bytes: int
    repeats: int
    num_checked: int


FULL = Sizes("bundled:target-6.7b", "bundled:draft-125m", (1, 8, 32), 8, 4 << 30, 100, 24)
DRY = Sizes("bundled:target", "bundled:draft", (1, 2), 2, 32 << 20, 3, 6)  # everything once and small, on any CPU


def main() -> int:
    """0 if every check passed. What there is of the results is written after each half."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    arguments = parser.parse_args()
    sizes = DRY if arguments.dry_run else FULL
    device = torch.device("cpu" if arguments.dry_run else "cuda:0")
    document = provenance("scripts/gpu_check") | {"machine": machine(device), "sizes": asdict(sizes)}
    for half in (check_outputs, time_passes):
        begun = time.monotonic()
        document |= half(sizes, device) | {f"{half.__name__}_s": time.monotonic() - begun}
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if all(check["passed"] for check in document["checks"]) else 1


def check_outputs(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    recorder = RerunRecorder() if device.type == "cpu" else None
    checks = run_checks(
        load_pair("bundled:target", "bundled:draft", str(device), "float32"), sizes.num_checked, recorder
    )
    for check in checks:
        print(f"{'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.detail}", flush=True)
    return {"checks": [asdict(check) for check in checks]}


def time_passes(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Draft passes of one query, target passes of one and of as many as the longest length needs, and prompts."""
    bandwidth = copy_bandwidth(device, sizes.copied_bytes)
    print(f"copying moves {bandwidth / 1e9:,.0f} GB/s", flush=True)
    pair = load_pair(sizes.target, sizes.draft, str(device), "auto" if device.type == "cpu" else "bfloat16")
    recorder = RerunRecorder() if device.type == "cpu" else None
    engine = EngineBench(pair, sizes.batch_sizes[-1], sizes.longest, recorder, backend="torch").engine
    target, draft = engine.target, engine.draft
    assert isinstance(target, CachedModel)
    assert isinstance(draft, CachedModel)
    found = []
    for name, model, queries in (("target", target, 1), ("target", target, sizes.longest + 1), ("draft", draft, 1)):
        for size in sizes.batch_sizes:
            found.append(time_pass(name, model, size, queries, CONTEXT_TOKENS, bandwidth, sizes.repeats))
            print(as_line(found[-1]), flush=True)
    for name, model in (("target", target), ("draft", draft)):
        for tokens in PROMPT_TOKENS:
            found.append(time_prompt(name, model, tokens, bandwidth, sizes.repeats))
            print(as_line(found[-1]), flush=True)
    return {
        "copy_bandwidth": bandwidth,
        "passes": [asdict(one) | {"efficiency": one.efficiency} for one in found],
    }


def as_line(one: PassTime) -> str:
    return (
        f"{one.model} pass, batch size {one.batch_size}, {one.num_queries} queries: {1e3 * one.seconds:.3f} ms, "
        f"floor {1e3 * one.floor_s:.3f} ms ({one.efficiency:.0%}), without captured graphs {1e3 * one.plain_seconds:.3f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
