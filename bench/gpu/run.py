"""`scripts/gpu_check`: whatever needs a GPU, within the minutes that there are.

Parts, each in processes of its own: checks of the engine; times of its steps and their passes; closed loops, `adaptive`
beside fixed arms; and vLLM under the plugin, on both of its model runners, beside fixed lengths. A part that fails or is
cut off does not end the others. Results, databases and logs lie in one folder.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from speclen.bench.gpu.parts import Part, run_parts
from speclen.bench.gpu.rates import as_table
from speclen.cli.support.machine import provenance

# What serving needs beyond torch and transformers.
NEEDED = ("grpc", "grpc_health", "typer", "structlog", "prometheus_client", "sqlite_utils")
BENCH = (sys.executable, "-m", "speclen.cli.app", "bench")
MODELS = "--device cuda --target bundled:target-6.7b --draft bundled:draft-125m --backend torch"
STEPS = "--batch-sizes 1,8,32 --lengths 0,1,3,5,8 --repeats 2"
SERVING = (
    "--track closed-wide --max-batch-size 32 --block-s 3 --learn-s 25 "
    "--compare adaptive,none,fixed:1,fixed:3,fixed:5,fixed:8,n-gram"
)
# Everything once and small, on any CPU.
DRY_MODELS = "--device cpu --target bundled:target --backend torch"
DRY_STEPS = "--batch-sizes 2 --lengths 2 --repeats 1 --new-tokens 4"
DRY_SERVING = (
    "--track closed-wide --max-batch-size 8 --max-length 2 --block-s 0.05 --learn-s 0.05 --repeats 4 "
    "--compare adaptive,fixed:2,n-gram"
)
BEFORE_ROUNDS_S = 120.0  # a worker's start, its round that is not counted and what `adaptive` learns from


def main() -> int:
    """0 if every part that could run did and every check passed. Speed never fails."""
    arguments = parser().parse_args()
    if not arguments.dry_run and not sees_a_gpu():
        print(
            "torch sees no CUDA device here: install a build of torch for it, or use --dry-run, which needs none",
            file=sys.stderr,
        )
        return 2
    begun, out = time.monotonic(), arguments.out
    out.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:6.1f} s  {text}", flush=True)

    without_vllm = "scripts/vllm_check runs it on a CPU" if arguments.dry_run else unpack(arguments.bundle)
    parts = parts_of(out, arguments.dry_run, arguments.bundle / "packages", without_vllm)
    outcomes = run_parts(parts, 60 * arguments.minutes - (time.monotonic() - begun), say)
    results = {part.result.stem: json.loads(part.result.read_text()) for part in parts if part.result.exists()}
    rates = {name: one["tokens_per_s"] for name, one in results.items() if "tokens_per_s" in one}
    for name, table in rates.items():
        print(as_table(name, table))
    document = provenance("scripts/gpu_check") | {"parts": [asdict(one) for one in outcomes], "tokens_per_s": rates}
    (out / "gpu_check.json").write_text(json.dumps(document, indent=2) + "\n")
    print(f"all results are in {out}")
    return 1 if any(one.end == "failed" for one in outcomes) else 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument("--minutes", type=float, default=14.0, help="for all parts together")
    parser.add_argument("--dry-run", action="store_true", help="everything once, small, on the CPU")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_check"), help="folder for the results")
    parser.add_argument("--bundle", type=Path, default=Path("build/gpu_bundle"), help="made by scripts/gpu/bundle.py")
    return parser


def sees_a_gpu() -> bool:
    import torch  # here, since it takes seconds

    return torch.cuda.is_available()


def unpack(bundle: Path) -> str:
    """Unpack a bundle's pieces (piece-1-of-2 and so on) beside them, once. Returns why there is no vLLM, "" if there is."""
    pieces, packages = sorted(bundle.glob("piece-*")), bundle / "packages"
    if find_spec("vllm") is not None or packages.exists():
        return ""
    if not pieces:
        return f"there is no vLLM here, and no bundle of it in {bundle}: scripts/gpu/bundle.py makes one"
    if len(pieces) < (wanted := int(pieces[0].name.rpartition("-")[2])):
        return f"{bundle} holds {len(pieces)} of the {wanted} pieces of its bundle: carry the others there"
    whole = io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))
    with tarfile.open(fileobj=whole, mode="r:xz") as archive:
        archive.extractall(bundle / "unpacking", filter="data")
    (bundle / "unpacking").rename(packages)
    return ""


def parts_of(out: Path, dry: bool, packages: Path, without_vllm: str) -> list[Part]:
    """packages: folder with `site`, what serving needs, and `vllm`, for machines where they are not installed."""
    site, flags = packages / "site", ["--dry-run"] if dry else []
    absent = [] if site.exists() else [name for name in NEEDED if find_spec(name) is None]
    without_own = f"not installed: {', '.join(absent)}" if absent else ""
    models = (DRY_MODELS if dry else MODELS).split()

    def module(name: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", f"speclen.bench.gpu.{name}", *arguments, *flags]

    def step(_: float) -> list[str]:
        options = (*(DRY_STEPS if dry else STEPS).split(), "--out", str(out / "steps.json"))
        return [*BENCH, "step", *models, *options]

    def serve(seconds: float) -> list[str]:
        minutes = 1.0 if dry else max(0.1, (seconds - BEFORE_ROUNDS_S) / 60)
        files = ("--minutes", str(minutes), "--reports", str(out / "own.db"), "--out", str(out / "own.json"))
        return [*BENCH, "serve", *models, *(DRY_SERVING if dry else SERVING).split(), *files]

    def vllm(runner: str) -> Part:
        result = out / f"vllm-{runner}.json"
        command = module("vllm_serving", "--runner", runner, "--out", str(result))
        return Part(
            result, 3.0, lambda seconds: [*command, "--seconds", str(seconds)], (site, packages / "vllm"), without_vllm
        )

    return [
        Part(out / "checks.json", 2.0, lambda _: module("checks", "--out", str(out / "checks.json")), (site,)),
        Part(out / "steps.json", 2.0, step, (site,), without_own),
        Part(out / "own.json", 5.0, serve, (site,), without_own),
        vllm("v1"),
        vllm("v2"),
    ]


if __name__ == "__main__":
    sys.exit(main())
