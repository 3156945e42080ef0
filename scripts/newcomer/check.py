"""The checks of scripts/newcomer_check. Standard library only: it is no part of what it checks."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from terminal import Running, Terminal

ROOT = Path(__file__).resolve().parents[2]
GUIDE = "docs/guides/serving.md"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def install(terminal: Terminal) -> None:
    """The wheel, built from a copy of the tracked files, in a fresh environment."""
    folder = terminal.folder
    subprocess.run(["git", "checkout-index", "-a", f"--prefix={folder}/checkout/"], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    terminal.type(f"pip wheel -q --no-deps --wheel-dir {folder}/dist {folder}/checkout", columns=0, timeout_s=1500)
    terminal.type(f'pip install -q "$(echo {folder}/dist/speclen-*.whl)[openvino]"', columns=0, timeout_s=1500)
    terminal.type('python -c "import torch, speclen; print(torch.__version__, speclen.__path__[0])"', columns=0)
    if terminal.faults:
        raise SystemExit("newcomer_check: the wheel cannot be installed")


def helps(terminal: Terminal) -> None:
    print("\n## Help of every verb, in 80 columns")
    verbs = re.findall(r"^│ ([a-z]+) ", terminal.type("speclen --help"), re.MULTILINE)
    terminal.must("speclen --help", len(verbs) > 12, "lists too few verbs")
    for verb in verbs:
        line = f"speclen {verb} --help"
        terminal.must(line, "…" not in terminal.type(line, quiet=True), "cuts words")


def readme(terminal: Terminal) -> None:
    """README's own commands, next to the `speclen up` that it starts, on the default ports."""
    print("\n## README's commands, in 80 columns")
    _, serve, *use = blocks("README.md", "sh")[1].strip().splitlines()
    up = terminal.start(serve)
    terminal.must(serve, up.wait_for("In another terminal", 240), "does not serve")
    for line in use:
        terminal.type(line, columns=0 if " generate " in line else 80)
    (terminal.folder / "home" / "program.py").write_text(blocks("docs/reference/grpc.md", "python")[0])
    terminal.type("python program.py", columns=0)
    terminal.type("timeout 4 speclen top", code=124)
    for verb in ("doctor", "explain --batch 4", "replay"):
        terminal.type(f"speclen {verb}")
    up.interrupt()
    terminal.end(up)


def guarded(terminal: Terminal) -> None:
    """The system of docs/guides/serving.md: its certificates and its file, with the bundled pair."""
    print(f"\n## TLS and a token, as {GUIDE} says")
    certificates = next(block for block in blocks(GUIDE, "sh") if "openssl" in block)
    terminal.type(certificates.replace("SERVER", "localhost"), columns=0)
    settings = re.sub(r'"meta-llama/.*"', '"bundled:target"', blocks(GUIDE, "toml")[0], count=1)
    settings = re.sub(r'"meta-llama/.*"', '"bundled:draft"', settings).replace('".speclen"', '"guarded"')
    (terminal.folder / "home" / "speclen.toml").write_text(settings)
    shutil.copy(ROOT / "docs/results/profile.json", terminal.folder / "home")
    file = {"SPECLEN_CONFIG": "speclen.toml"}
    running: list[Running] = []
    for verb in ("controller", "worker"):
        running.append(terminal.start(f"speclen {verb}", **file))
        terminal.must(f"speclen {verb}", running[-1].wait_for(" serving on ", 120), "does not serve")
    terminal.type('speclen generate "def add(a, b):" --max-tokens 32', columns=0, **file)
    terminal.type("timeout 4 speclen top", code=124, **file)
    line = "speclen top --json"
    terminal.must(line, '"table_source"' in terminal.type(line, columns=0, **file), "did not reach the worker")
    line = "speclen profile import profile.json --as-prior"
    imported = terminal.type(line, **file).replace("\n", "")
    terminal.must(line, "guarded" in imported, "does not name the database that took it")
    for each in reversed(running):
        each.interrupt()
        terminal.end(each, columns=0, quiet=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in a background job ignores it
    folders = tempfile.TemporaryDirectory(prefix="newcomer-", ignore_cleanup_errors=True)
    with folders as folder, Terminal(Path(folder).resolve()) as terminal:
        install(terminal)
        helps(terminal)
        readme(terminal)
        guarded(terminal)
    print("", f"{len(terminal.faults)} faults", *terminal.faults, sep="\n")
    sys.exit(1 if terminal.faults else 0)


if __name__ == "__main__":
    main()
