"""The wheel holds everything that a worker and a controller need."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def build(source: Path, kind: str, out: Path) -> Path:
    """The wheel or sdist of a source tree, made by its build backend."""
    code = f"from setuptools.build_meta import build_{kind}; print(build_{kind}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, text=True)
    return out / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what is tracked: setuptools leaves build/ and an egg-info behind."""
    copy = tmp_path_factory.mktemp("wheel") / "checkout"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        source, place = ROOT / name, copy / name
        if not source.exists() and not source.is_symlink():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(source.readlink()) if source.is_symlink() else place.write_bytes(source.read_bytes())
    return copy


@pytest.fixture(scope="module")
def wheel(checkout):
    return build(checkout, "wheel", checkout.parent)


def test_what_is_imported_is_declared():
    """huggingface_hub and uvicorn were there only because something else wanted them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {normal(re.split(r"[^A-Za-z0-9._-]", each)[0]) for group in groups for each in group}
    tops = [path for path in (ROOT / "proto" / "speclen").iterdir() if path.is_symlink()]
    found = {name for top in tops for path in top.resolve().rglob("*.py") for name in imported(path)}
    outside = found - set(sys.stdlib_module_names) - {"speclen"}
    named = packages_distributions()
    unnamed = {name for name in outside - HOSTS if not declared & {normal(each) for each in named.get(name, [name])}}
    assert not unnamed


# Versions that vLLM 0.32 and 0.33 pin, or may find in their environment: the base package has to take them as they are.
BESIDE_VLLM = {
    "protobuf": ["6.33.5", "7.36.1"],
    "numpy": ["2.2", "2.3.5"],
    "pydantic": ["2.12.0"],
    "grpcio": ["1.80.0"],
}
PINNED_BY_VLLM = {"torch", "transformers", "fastapi", "llguidance", "huggingface-hub", "tokenizers", "safetensors"}


def test_the_base_package_changes_nothing_next_to_vllm():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {normal(each.name): each for each in map(Requirement, project["dependencies"])}
    assert not base.keys() & PINNED_BY_VLLM
    assert not [name for name in base if name.startswith("grpcio-")], "they want a gRPC as new as themselves"
    assert all(version in base[name].specifier for name, versions in BESIDE_VLLM.items() for version in versions)


HOSTS = {"vllm"}  # engines that load the plugin, and are not dependencies of ours


def normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def imported(path: Path) -> set[str]:
    """First words of what a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_the_wheel_holds_every_module_and_all_data(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    tops = [path.name for path in (ROOT / "proto" / "speclen").iterdir() if path.is_symlink()]
    wanted = {
        f"speclen/{path.relative_to(ROOT)}"
        for top in tops
        for path in (ROOT / top).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    wanted |= {"speclen/py.typed", "speclen/v1/control_pb2.py", "speclen/v1/generation_pb2_grpc.py"}
    wanted |= {
        "speclen/store/schema.sql",
        "speclen/cli/dashboard.yaml",
        "speclen/bench/serving/chat.toml",
        "speclen/worker/bundled/target/model.safetensors",
    }
    assert wanted <= held, sorted(wanted - held)[:10]


def test_an_installed_wheel_answers(wheel, tmp_path):
    """Unpacked where nothing else of the project is, every verb's help comes from the wheel."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import speclen.cli.app as app; "
        f"assert app.__file__.startswith({str(tmp_path)!r}), app.__file__; sys.argv = ['speclen', '--help']; app.main()"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "controller" in done.stdout
