"""Imports point one way, through folders as well as packages; the estimator and the light programs stay light.

A docstring names a thing or an action.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = ("bench", "cli", "controller", "integrations", "store", "transport", "worker")

# What a folder may import of ours, besides itself: the house, from the ground up.
ALLOWED = {
    "store": set(),
    "transport": set(),
    "worker.models": set(),
    "worker.backends": {"worker.models"},
    "worker.structured": {"worker.models.upload"},
    "worker.sampling": {"worker.models.upload", "worker.structured"},
    "worker.drafting": set(),
    "worker.requests": {"worker.drafting", "worker.sampling", "worker.structured"},
    "worker.evaluation": {"worker.drafting", "worker.backends", "worker.sampling", "worker.requests"},
    "worker.engine": {
        "worker.drafting",
        "worker.models",
        "worker.backends",
        "worker.sampling",
        "worker.requests",
        "worker.evaluation",
    },
    "worker.config": {"worker.models.naming", "transport", "worker.drafting"},
    "worker.reporting": {"v1", "transport", "worker.drafting", "worker.models"},
    "worker.profiling": {
        "v1",
        "transport.address",
        "worker.config",
        "worker.models",
        "worker.backends",
        "worker.drafting",
        "worker.engine",
        "worker.requests",
        "worker.reporting",
    },
    "worker.http": {
        "transport",
        "worker.config",
        "worker.requests",
        "worker.structured",
        "worker.service.async_engine",
        "worker.service.relay",
    },
    "worker.observing": {"transport", "worker.engine", "worker.reporting", "worker.requests"},
    "worker.service": {
        "v1",
        "transport",
        "worker.config",
        "worker.models",
        "worker.backends",
        "worker.engine",
        "worker.requests",
        "worker.sampling",
        "worker.structured",
        "worker.observing",
        "worker.profiling",
        "worker.reporting",
    },
    "controller.estimator": set(),
    "controller.analysis": {"controller.estimator"},
    "controller.config": {"transport"},
    "controller.wire": {"v1", "store.records"},
    "controller.service": {"v1", "transport", "store", "controller.config", "controller.estimator", "controller.wire"},
    "cli.support": {"v1", "transport", "store", "worker.models.devices"},
    "cli.learned": {"cli.support", "v1", "transport", "store", "controller"},
    "cli.up": {"cli.support", "cli.learned", "v1", "transport", "store", "worker", "integrations.ray"},
    "bench.rates": set(),
    "bench.spread": set(),
    "cli.profile": {"cli.support", "v1", "worker", "controller", "store"},
    "bench.fleet": {"bench.spread", "cli.support", "v1", "transport", "worker.models.devices"},
    "bench.simulation": {"cli.support", "controller.estimator", "integrations.vllm"},
    "bench.engine": {"bench.spread", "cli.support", "worker"},
    "bench.gpu": {"bench.engine", "bench.serving", "cli.support", "integrations.vllm", "worker"},
    "bench.serving": {
        "cli.profile",
        "cli.support",
        "v1",
        "transport",
        "worker",
    },
    "bench.comparison": {"bench.serving", "cli.support", "v1", "transport", "worker"},
    # In other people's processes: what a worker tells a controller, and nothing of what it runs models with.
    "integrations.vllm": {
        "v1",
        "transport",
        "worker.config",
        "worker.drafting.arm_chooser",
        "worker.models.devices",
        "worker.reporting",
    },
    # In processes of Ray's: a controller, or a worker with both its edges.
    "integrations.ray": {"v1", "transport", "store", "controller", "worker"},
    "cli": {"v1", "transport", "worker", "controller", "store"},
}
# What the estimator must not even load: it has no transport, no storage, no clock of its own and no models.
HEAVY = {"asyncio", "google", "grpc", "speclen.v1", "speclen.store", "sqlite3", "sqlite_utils", "torch"}
CLOCKS = {"time", "datetime"}


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names if is_ours(f"{node.module}.{alias.name}")}
    return names


def is_ours(name: str) -> bool:
    parts = name.split(".")
    place = ROOT.joinpath(*parts[1:])
    return parts[0] == "speclen" and (place.is_dir() or place.with_suffix(".py").exists())


def room_of(path: Path) -> str:
    """The key of ALLOWED that a file belongs to."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return next((".".join(parts[:n]) for n in (2, 1) if ".".join(parts[:n]) in ALLOWED), parts[0])


def within(name: str, rooms: set[str]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


SOURCES = sorted(path for top in TOP for path in (ROOT / top).rglob("*.py"))
UNPACKAGED = sorted(path for top in ("scripts", "tests") for path in (ROOT / top).rglob("*.py"))


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_lies_below_it(room):
    files = [path for path in SOURCES if room_of(path) == room]
    assert files, f"there is no room {room}"
    for path in files:
        ours = {name.removeprefix("speclen.") for name in imported(path) if name.startswith("speclen.")}
        above = {name for name in ours if not within(name, ALLOWED[room] | {room, "records"})}
        above -= {name for name in above if any(allowed.startswith(f"{name}.") for allowed in ALLOWED[room])}
        assert not above, f"{path.relative_to(ROOT)} imports {sorted(above)}"


def test_every_file_belongs_to_a_room():
    strays = [path for path in SOURCES if room_of(path) not in ALLOWED and path.name != "__init__.py"]
    assert not strays


def test_everything_is_imported_by_its_one_name():
    """`import worker` would work in the root of a checkout, and give every module a second time."""
    for path in (*SOURCES, *UNPACKAGED):
        assert not {name.partition(".")[0] for name in imported(path)} & set(TOP), path


def test_the_estimator_is_pure():
    """No gRPC, no SQLite, no clock in the whole folder: the same observations give the same decisions."""
    modules = [path for path in SOURCES if path.is_relative_to(ROOT / "controller" / "estimator")]
    for path in modules:
        assert not imported(path) & CLOCKS, path
    names = ["speclen." + ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules]
    names += ["speclen.controller.analysis.replay", "speclen.controller.analysis.explain"]
    imports = "; ".join(f"import {name.removesuffix('.__init__')}" for name in names)
    code = f"import sys; {imports}; print(*(set({sorted(HEAVY)}) & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not found


def test_keys_and_values_and_sampling_know_nothing_of_requests():
    for path in (*(ROOT / "worker" / "backends").glob("*.py"), *(ROOT / "worker" / "sampling").glob("*.py")):
        assert not {
            name for name in imported(path) if name.startswith(("speclen.worker.engine", "speclen.worker.requests"))
        }, path


@pytest.mark.parametrize(
    "module",
    [
        "speclen.controller.service.server",
        "speclen.store",
        "speclen.worker.config",
        "speclen.cli.app",
        "speclen.cli.controller",
        "speclen.cli.generate",
        "speclen.cli.up.up",
        "speclen.cli.worker",
    ],
)
def test_light_programs_never_import_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_gpu_check_needs_nothing_that_a_bare_machine_with_torch_lacks():
    missing = {"grpc", "google.protobuf", "matplotlib", "rich", "speclen.v1", "structlog", "typer"}
    modules = "speclen.bench.gpu.checks, speclen.bench.rates"
    code = f"import sys; sys.modules.update(dict.fromkeys({sorted(missing)})); import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_test_module_imports_another():
    """Shared helpers live in tests/support."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert not {name for name in imported(path) if name.rpartition(".")[2].startswith("test_")}, path


def test_no_import_package_is_called_proto():
    """proto-plus owns that name."""
    assert not (ROOT / "proto" / "__init__.py").exists()


def test_no_folder_holds_more_modules_than_a_reader_can_keep_in_mind():
    for folder in {path.parent for path in SOURCES}:
        modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= 14, f"{folder.relative_to(ROOT)}: {sorted(modules)}"


QUESTIONS = {"That", "What", "Where", "Whether", "Which", "Who", "Whose"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_docstrings_begin_with_a_noun_or_an_imperative():
    for path in (*SOURCES, *UNPACKAGED):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, DOCUMENTED)]
        texts = {node.body[0].lineno: ast.get_docstring(node) for node in nodes if ast.get_docstring(node)}
        begin = {f"{path.relative_to(ROOT)}:{line}": re.match(r"\w*", text)[0] for line, text in texts.items()}
        assert not {place: word for place, word in begin.items() if word in QUESTIONS}
