"""The wheel puts one name into site-packages, and with it everything that a worker and a controller need."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"  # setuptools leaves build/ and an egg-info behind
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        source, place = ROOT / name, copy / name
        if not source.exists() and not source.is_symlink():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(source.readlink()) if source.is_symlink() else place.write_bytes(source.read_bytes())
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('..'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True, text=True)
    return folder / done.stdout.split()[-1]


def test_the_wheel_installs_one_name(wheel: Path) -> None:
    names = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"speclen"}


def test_the_wheel_holds_every_module_and_all_data(wheel: Path) -> None:
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
        "speclen/cli/inspect.yaml",
        "speclen/worker/bundled/target/model.safetensors",
    }
    assert wanted <= held, sorted(wanted - held)[:10]


def test_an_installed_wheel_answers(wheel: Path, tmp_path: Path) -> None:
    """Unpacked where nothing else of the project is, every verb's help comes from the wheel."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import speclen.cli.app as app; "
        f"assert app.__file__.startswith({str(tmp_path)!r}), app.__file__; sys.argv = ['speclen', '--help']; app.main()"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "controller" in done.stdout
