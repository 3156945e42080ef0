"""`scripts/gpu_check`: on a machine with a GPU, is the engine right, and how near to the hardware's limit is it?

Needs torch, transformers and numpy, and nothing of this project's environment but its source; for the serving tracks at the
end, what `speclen` itself needs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from speclen.bench.engine.run import EngineBench
from speclen.bench.gpu.checks import Check, run_checks
from speclen.bench.gpu.grid import Cell, prompt_source, run_baselines, run_grid, serve_and_learn
from speclen.bench.gpu.passes import PassTime, copy_bandwidth, time_pass, time_prompt
from speclen.bench.gpu.plots import draw
from speclen.bench.gpu.sizes import DRY, FULL, Sizes
from speclen.bench.gpu.tracks import run_tracks
from speclen.bench.machine import machine, provenance
from speclen.worker.backends.cached_model import CachedModel
from speclen.worker.backends.recording import RerunRecorder
from speclen.worker.models.loading import load_pair


def main() -> int:
    """0 when every correctness check passed; speed never fails, it is printed beside its aim."""
    arguments = parser().parse_args()
    dry = arguments.dry_run
    if not dry and not torch.cuda.is_available():
        print("torch sees no CUDA device here; --dry-run goes through everything on the CPU", file=sys.stderr)
        return 2
    sizes = DRY if dry else FULL
    if arguments.without_tracks:
        sizes = replace(sizes, tracks=())
    device = torch.device("cpu" if dry else "cuda:0")
    arguments.out.mkdir(parents=True, exist_ok=True)
    document = run(sizes, device, arguments.out)
    path = arguments.out / "gpu_check.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"wrote {path}")
    if picture := draw(document, arguments.out):
        print(f"wrote {picture}")
    failed = [check["name"] for check in document["checks"] if not check["passed"]]
    for name in failed:
        print(f"FAILED: {name}", file=sys.stderr)
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="everything once, small, on the CPU")
    parser.add_argument(
        "--without-tracks", action="store_true", help="all but the serving tracks: minutes, not an hour"
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu_check"), help="folder for JSON and picture")
    return parser


def run(sizes: Sizes, device: torch.device, out: Path) -> dict[str, Any]:
    """All parts in order; each is printed when it is done. out: for the files of the tracks."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", flush=True)

    recorder = RerunRecorder() if device.type == "cpu" else None
    checks = run_checks(load_pair("bundled:target", "bundled:draft", str(device), "float32"), sizes, recorder)
    for check in checks:
        say(f"{'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.detail}")
    bandwidth = copy_bandwidth(device, sizes.copied_bytes)
    say(f"copying moves {bandwidth / 1e9:,.0f} GB/s")
    pair = load_pair(sizes.target, sizes.draft, str(device), "auto" if device.type == "cpu" else "bfloat16")
    say(f"{sizes.target} and {sizes.draft} are loaded")
    bench = EngineBench(pair, sizes.batch_sizes[-1], sizes.lengths[-1], recorder, backend="torch")
    source = prompt_source(pair)
    passes, prompts = run_passes(bench, sizes, bandwidth), run_prompts(bench, sizes, bandwidth)
    for one in (*passes, *prompts):
        say(as_line(one))
    cells = run_grid(bench, source, sizes, say)
    del bench
    baselines = run_baselines(pair, source, sizes)
    for row in baselines:
        say(f"transformers {row['what']}, batch size {row['batch_size']}: {row['tokens_per_s']:,.0f} tokens/s")
    learned = serve_and_learn(pair, source, sizes)
    say(f"served {learned['num_steps']} steps at {learned['tokens_per_s']:,.0f} tokens/s while learning")
    del pair  # the tracks load it again, in a process of their own
    tracks = run_tracks(sizes, device.type, out, say)
    checks += [
        Check(f"track {one['track']} is served", "failed" not in one, one.get("failed", "yes")) for one in tracks
    ]
    found = aims(passes, cells, baselines)
    for aim in found:
        say(f"{aim['what']}: {aim['found']:.3g} (aim {aim['aim']})")
    facts = provenance("scripts/gpu_check") | {"machine": machine(device), "sizes": asdict(sizes)}
    timed = {
        name: [asdict(one) | {"efficiency": one.efficiency} for one in some]
        for name, some in (("passes", passes), ("prompts", prompts))
    }
    rows = {"checks": [asdict(check) for check in checks], "cells": [asdict(cell) for cell in cells], **timed}
    parts = {"copy_bandwidth": bandwidth, "baselines": baselines, "learned": learned, "tracks": tracks, "aims": found}
    return facts | {"seconds": time.monotonic() - started} | rows | parts


def run_passes(bench: EngineBench, sizes: Sizes, bandwidth: float) -> list[PassTime]:
    """Draft passes of one query, target passes of one query and of as many as the longest length needs."""
    engine, found = bench.engine, []
    assert engine.draft is not None
    for batch_size in (sizes.batch_sizes[0], sizes.batch_sizes[-1]):
        for name, model, queries in (
            ("target", engine.target, 1),
            ("target", engine.target, sizes.lengths[-1] + 1),
            ("draft", engine.draft, 1),
        ):
            assert isinstance(model, CachedModel)
            found.append(
                time_pass(name, model, batch_size, queries, sizes.prompt_tokens, bandwidth, sizes.pass_repeats)
            )
    return found


def run_prompts(bench: EngineBench, sizes: Sizes, bandwidth: float) -> list[PassTime]:
    """Passes of single prompts, of both models."""
    models = [("target", bench.engine.target), ("draft", bench.engine.draft)]
    return [
        time_prompt(name, model, num_tokens, bandwidth, sizes.pass_repeats)
        for name, model in models
        for num_tokens in sizes.timed_prompts
        if isinstance(model, CachedModel)
    ]


def as_line(one: PassTime) -> str:
    return (
        f"{one.model} pass, batch size {one.batch_size}, {one.num_queries} queries: {1e3 * one.seconds:.3f} ms, "
        f"floor {1e3 * one.floor_s:.3f} ms ({one.efficiency:.0%}), unrecorded {1e3 * one.plain_seconds:.3f} ms"
    )


def aims(passes: list[PassTime], cells: list[Cell], baselines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was hoped for on an H200-class GPU in bfloat16, and what was found."""
    rate = {(cell.batch_size, cell.speculation_length): cell.tokens_per_s for cell in cells}
    least, most = min(cell.batch_size for cell in cells), max(cell.batch_size for cell in cells)
    generate = {row["batch_size"]: row["tokens_per_s"] for row in baselines if row["what"] == "generate"}

    def gain(batch_size: int) -> float:
        return max(value for (size, _), value in rate.items() if size == batch_size) / rate[batch_size, 0]

    target = next(one for one in passes if one.model == "target" and one.num_queries == 1)
    draft = next(one for one in passes if one.model == "draft")
    found = [
        ("target pass at batch size 1, share of the copy bandwidth", target.efficiency, ">= 0.8"),
        ("draft pass at batch size 1, ms", 1e3 * draft.seconds, "< 0.5"),
        (f"best length over length 0 at batch size {least}", gain(least), ">= 2.7"),
        (f"best length over length 0 at batch size {most}", gain(most), ">= 1.3"),
        (f"length 0 over transformers' generate at batch size {least}", rate[least, 0] / generate[least], ">= 3"),
    ]
    gaps = [cell.host_share for cell in cells if cell.host_share is not None]
    if gaps:
        found.append(("largest share of a step in which the device waits for the host", max(gaps), "< 0.05"))
    return [{"what": what, "found": value, "aim": aim} for what, value, aim in found]


if __name__ == "__main__":
    sys.exit(main())
