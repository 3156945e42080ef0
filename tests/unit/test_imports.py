"""Imports point one way, through folders as well as packages; the estimator and the light programs stay light."""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from scripts.house import arrows_between_rooms, imports_of
from speclen.cli.app import VERBS

ROOT = Path(__file__).parents[2]
ARROWS = arrows_between_rooms()
# Packages that are above or beside one, which it never imports.
APART = {
    "store": {"transport", "worker", "controller", "integrations", "cli", "bench"},
    "transport": {"store", "worker", "controller", "integrations", "cli", "bench"},
    "worker": {"store", "controller", "integrations", "cli", "bench"},
    "controller": {"worker", "integrations", "cli", "bench"},
    "integrations": {"cli", "bench"},
    "cli": {"bench"},
}
# Of the rooms that have to stay small, all that they may reach, over any number of imports.
BASE = {"worker/models", "worker/structured", "worker/sampling", "worker/drafting"}
REPORTING = {"proto", "transport", "worker/drafting", "worker/models"}
REACHED = {
    "controller/estimator": set(),
    "controller/analysis": {"controller/estimator"},
    "controller/wire": {"proto", "store"},
    "worker/models": set(),
    "worker/drafting": set(),
    "worker/structured": {"worker/models"},
    "worker/backends": {"worker/models"},
    "worker/sampling": {"worker/models", "worker/structured"},
    "worker/requests": BASE,
    "worker/engine": BASE | {"worker/requests", "worker/backends", "worker/evaluation"},
    "worker/reporting": REPORTING,
    # In other people's processes: what a worker tells a controller, and nothing of what it runs models with.
    "integrations/vllm": REPORTING | {"worker/reporting"},
}
# What the estimator must not even load: it has no transport, no storage, no clock of its own and no models.
HEAVY = {"asyncio", "google", "grpc", "speclen.v1", "speclen.store", "sqlite3", "sqlite_utils", "torch"}
CLOCKS = {"time", "datetime"}


def files_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def reachable(room: str) -> set[str]:
    """Rooms that one reaches over any number of imports; itself where they go round."""
    found: set[str] = set()
    waiting = [room]
    while waiting:
        new = ARROWS[waiting.pop()] - found
        found |= new
        waiting += new
    return found


@pytest.mark.parametrize("package", APART)
def test_a_package_imports_none_above_or_beside_it(package):
    for path in files_of(package):
        assert not {name.partition(".")[0] for name in imports_of(path)} & APART[package], path


@pytest.mark.parametrize("room", REACHED)
def test_a_small_room_reaches_only_what_lies_below_it(room):
    assert reachable(room) <= REACHED[room]


def test_no_room_is_entered_from_below():
    assert not {room for room in ARROWS if room in reachable(room)}


def loaded_by(*modules: str, missing: Iterable[str] = ()) -> set[str]:
    """Modules that a process holds after importing these of ours where others are missing."""
    names = ", ".join(f"speclen.{name}" for name in modules)
    code = f"import sys; sys.modules.update(dict.fromkeys({sorted(missing)})); import {names}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_the_estimator_is_pure():
    """No gRPC, no SQLite, no clock in the whole folder: the same observations give the same decisions."""
    modules = files_of("controller/estimator")
    for path in modules:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        assert not (names | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}) & CLOCKS, path
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in modules]
    assert not loaded_by(*names, "controller.analysis.replay", "controller.analysis.explain") & HEAVY


# What the base package goes without: the engine's, and what its other extras bring.
EXTRAS = {"torch", "transformers", "tokenizers", "huggingface_hub", "safetensors", "fastapi", "starlette", "uvicorn"}
EXTRAS |= {
    "httptools",
    "jinja2",
    "openvino",
    "llguidance",
    "matplotlib",
    "datasette",
    "grpc_health",
    "grpc_reflection",
    "ray",
}


def test_the_base_package_runs_without_its_extras():
    verbs = [module.removeprefix("speclen.") for module, *_ in VERBS.values()]
    assert loaded_by("controller.service.server", "store.backup", "worker.config", *verbs, missing=EXTRAS)


def test_vllms_process_loads_neither_our_torch_nor_our_engine():
    ours = {"speclen.worker.engine.engine", "speclen.worker.backends", "speclen.controller"}
    heavy = {"torch", "transformers", "fastapi", "typer", "sqlite_utils"}
    assert not loaded_by("integrations.vllm.steering") & (ours | heavy)


def test_vllms_other_processes_load_next_to_nothing_of_the_plugin():
    """vLLM calls `register` in all of them, and each worker of a V2 draft model loads what follows lengths."""
    package = {"speclen", "speclen.integrations", "speclen.integrations.vllm"}
    for module, own in (
        ("integrations.vllm", set()),
        ("integrations.vllm.startup", {"speclen.integrations.vllm.startup"}),
    ):
        loaded = loaded_by(module)
        assert {name for name in loaded if name.startswith("speclen")} == package | own
        assert not loaded & {"grpc", "google.protobuf", "structlog", "numpy", "torch"}


def test_the_gpu_check_needs_nothing_that_a_bare_machine_with_torch_lacks():
    missing = {"grpc", "google.protobuf", "matplotlib", "rich", "speclen.v1", "structlog", "typer"}
    assert loaded_by("bench.gpu.checks", "bench.rates", missing=missing)


