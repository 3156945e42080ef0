"""The checks of scripts/newcomer_check. Standard library only: it is no part of what it checks."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import ROOT, Report
from terminal import Running, Terminal

CONTROLLER, WORKER = "127.0.0.1:7070", "127.0.0.1:7080"  # the defaults
KUBERNETES = {"SPECLEN_SERVICE_HOST": "10.0.0.1", "SPECLEN_SERVICE_PORT": "7070", "SPECLEN_PORT": "tcp://10.0.0.1:7070"}


def shell_blocks(page: str) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def is_free(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            return False
    return True


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def tracked_copy(folder: Path) -> Path:
    """The tracked files, so that building leaves nothing behind in the checkout."""
    copy = folder / "checkout"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        source, place = ROOT / name, copy / name
        if source.exists() or source.is_symlink():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place, follow_symlinks=False)
    return copy


def install(folder: Path, report: Report) -> Terminal:
    """The wheel in a fresh environment, and a terminal in a folder where nothing of the checkout is."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    home = folder / "home"
    home.mkdir()
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("SPECLEN_", "PYTHON", "VIRTUAL_ENV"))
    }
    terminal = Terminal(home, {**kept, "PATH": f"{folder}/venv/bin:{os.environ['PATH']}", **KUBERNETES})
    copy, begun = tracked_copy(folder), time.monotonic()
    for line in (
        f"pip wheel -q --no-deps --wheel-dir {folder}/dist {copy}",
        f'pip install -q "$(echo {folder}/dist/speclen-*.whl)[openvino]"',
    ):
        seen = terminal.type(line, 1500)
        if seen.code:
            raise SystemExit(f"newcomer_check: {line} ended with {seen.code}:\n{seen.text}")
    size = sum(path.stat().st_size for path in (folder / "venv").rglob("*") if path.is_file() and not path.is_symlink())
    report.say(f"wheel built and installed in {time.monotonic() - begun:.0f} s, environment of {size / 1e9:.1f} GB")
    report.show(terminal.type('python -c "import torch, speclen; print(torch.__version__, speclen.__path__[0])"'))
    report.must("speclen", shutil.which("speclen", path=f"{folder}/venv/bin") is not None, "is not on the PATH")
    return terminal


def readme(terminal: Terminal, report: Report) -> None:
    """README's own commands, beside the `speclen up` that it starts, on the default ports."""
    report.say("\n## README's commands, in 80 columns")
    _, serve, *use = shell_blocks("README.md")[1].strip().splitlines()
    up = terminal.start(serve)
    if not up.wait_for("In another terminal", 240):
        report.show(up.end(1, interrupt=True))
        raise SystemExit("newcomer_check: README's `speclen up` does not serve")
    for line in use:
        report.show(terminal.type(line), columns=0 if " generate " in line else 80)
    page = (ROOT / "docs/reference/grpc.md").read_text()
    program = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    (terminal.folder / "program.py").write_text(program)
    report.show(terminal.type("python program.py"), columns=0)
    report.show(terminal.type("timeout 4 speclen top"), code=124)
    for verb in ("doctor", "explain --batch 4", "replay"):
        report.show(terminal.type(f"speclen {verb}"))
    report.show(up.end(60, interrupt=True))


def helps(terminal: Terminal, report: Report) -> None:
    report.say("\n## Help of every verb, in 80 columns")
    overview = terminal.type("speclen --help")
    report.show(overview)
    verbs = re.findall(r"^│ ([a-z]+) ", overview.text, re.MULTILINE)
    report.must("speclen --help", len(verbs) > 12, "lists too few verbs")
    for verb in verbs:
        seen = terminal.type(f"speclen {verb} --help")
        report.show(seen, quiet=True)
        report.must(seen.line, "…" not in seen.text, "cuts words")
    report.say(f"{len(verbs)} verbs: nothing cut, nothing over 80 columns")


def guarded(terminal: Terminal, report: Report) -> None:
    """The system of docs/guides/serving.md: its certificates, its file, with free ports and the bundled pair."""
    report.say("\n## TLS and a token, as docs/guides/serving.md says")
    certificates = next(block for block in shell_blocks("docs/guides/serving.md") if "openssl" in block)
    report.show(terminal.type(certificates.replace("SERVER", "localhost")), columns=0)
    toml = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/guides/serving.md").read_text(), re.MULTILINE | re.DOTALL)[
        0
    ]
    ports = {port: free_address().rpartition(":")[2] for port in ("7070", "7080", "9070", "9080")}
    for port, own in ports.items():
        toml = toml.replace(port, own)
    toml = toml.replace("meta-llama/Llama-3.1-8B", "bundled:target").replace("meta-llama/Llama-3.2-1B", "bundled:draft")
    (terminal.folder / "speclen.toml").write_text(toml.replace('".speclen"', '"guarded"'))
    file = {"SPECLEN_CONFIG": str(terminal.folder / "speclen.toml")}
    running: list[Running] = []
    try:
        for verb in ("controller", "worker"):
            running.append(terminal.start(f"speclen {verb}", **file))
            report.must(f"speclen {verb}", running[-1].wait_for(" serving on ", 120), "does not serve")
        report.show(terminal.type('speclen generate "def add(a, b):" --max-tokens 32', **file), columns=0)
        report.show(terminal.type("timeout 4 speclen top", **file), code=124)
        said = terminal.type("speclen top --json", **file)
        report.must("speclen top --json", '"table_source"' in said.text, "did not reach the worker")
        imported = terminal.type("speclen profile import profile.json --as-prior", **file)
        report.show(imported)
        report.must(
            imported.line, "guarded" in imported.text.replace("\n", ""), "does not name the database that took it"
        )
    finally:
        for each in reversed(running):
            report.show(each.end(60, interrupt=True), columns=0, quiet=True)


def check(folder: Path, report: Report) -> None:
    for address in (CONTROLLER, WORKER):
        if not is_free(address):
            raise SystemExit(f"newcomer_check: {address} is taken: it has to be free, since README uses it")
    terminal = install(folder, report)
    helps(terminal, report)
    readme(terminal, report)
    shutil.copy(ROOT / "docs/results/profile.json", terminal.folder / "profile.json")
    guarded(terminal, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="file for what was seen")
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="newcomer-")).resolve()
    report = Report(folder)
    try:
        check(folder, report)
    finally:
        report.say(f"\n{len(report.faults)} faults")
        for fault in report.faults:
            report.say(f"- {fault}")
        if options.report:
            options.report.write_text("\n".join(report.lines) + "\n", "utf-8")
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()
