"""Imports point one way: stubs and store import nothing of ours, worker the stubs, controller the stubs and the store."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"bench", "cli", "controller", "speclen", "store", "transport", "worker"}
ALLOWED = {
    "store": set(),
    "transport": set(),
    "worker": {"speclen", "transport"},
    "controller": {"speclen", "store", "transport"},
}
# Within the worker these know nothing of requests.
WORKER_CORE = {"kv_cache", "sampling"}


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_lies_below_them(package):
    for path in (ROOT / package).rglob("*.py"):
        roots = {name.partition(".")[0] for name in imported(path)} & OURS
        assert roots <= ALLOWED[package] | {package}, f"{path.relative_to(ROOT)} imports {roots}"


@pytest.mark.parametrize(
    "module",
    [
        "speclen.controller.estimator.controller",
        "speclen.controller.analysis.replay",
        "speclen.controller.analysis.explain",
    ],
)
def test_the_estimator_knows_nothing_of_transport_or_storage(module):
    forbidden = {"asyncio", "google", "grpc", "speclen", "sqlite3", "sqlite_utils", "store", "torch"}
    code = f"import sys, {module}; print(*(set({sorted(forbidden)}) & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not found


def test_sampling_and_kv_cache_know_nothing_of_requests():
    for name in WORKER_CORE:
        names = imported(ROOT / "worker" / f"{name}.py")
        assert not {
            n
            for n in names
            if n.startswith(
                ("speclen.worker.engine.request", "speclen.worker.engine.engine", "speclen.worker.engine.scheduler")
            )
        }, name


@pytest.mark.parametrize(
    "module",
    ["speclen.controller.service.server", "store", "speclen.cli.app", "speclen.cli.generate", "speclen.cli.up"],
)
def test_light_programs_never_import_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_gpu_check_needs_nothing_that_a_bare_machine_with_torch_lacks():
    missing = {"grpc", "google.protobuf", "matplotlib", "rich", "speclen", "structlog", "typer"}
    code = f"import sys; sys.modules.update(dict.fromkeys({sorted(missing)})); import speclen.bench.gpu.check"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_import_package_is_called_proto():
    """proto-plus owns that name."""
    assert not (ROOT / "proto" / "__init__.py").exists()
