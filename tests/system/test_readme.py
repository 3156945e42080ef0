"""The commands of README work in their order with one `speclen up`, and so do the examples of the HTTP reference."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from speclen.process.supervision import start_tied
from speclen.worker.models.loading import load_pair
from tests.support.addresses import free_address
from tests.support.http_worker import http_worker
from tests.support.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GRPC = (ROOT / "docs" / "reference" / "grpc.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", GRPC, re.M | re.S)
SERVE = "speclen up"


class Terminal:
    """A folder with settings that keep two tests from sharing ports; commands are found as in an active environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.controller, self.worker = free_address(), free_address()
        (folder / "bin").mkdir()
        for name, module in (("speclen", "speclen.cli.app"), ("sqlite-utils", "sqlite_utils"), ("python", "")):
            words = f'"{sys.executable}"' + (f" -m {module}" if module else "")
            (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            (folder / "bin" / name).chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "SPECLEN_UP_CONTROLLER": self.controller,
            "SPECLEN_UP_LISTEN": self.worker,
            "SPECLEN_UP_HTTP_LISTEN": free_address(),
            "SPECLEN_UP_MAX_BATCH_SIZE": "4",
            "SPECLEN_CLIENT_WORKER": self.worker,
            "COLUMNS": "80",
        }

    def start(self, line: str) -> subprocess.Popen[str]:
        return start_tied(
            line.split(),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str) -> str:
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """A terminal next to the one in which README's `speclen up` runs."""
    terminal = Terminal(tmp_path_factory.mktemp("readme"))
    up = terminal.start(SERVE)
    said = []
    for line in up.stdout:  # ends when it dies
        said.append(line)
        if line.startswith("  speclen tables"):
            break
    assert up.poll() is None, "".join(said)
    yield terminal
    up.terminate()
    assert up.wait(PATIENCE_S) == 0


COMMANDS = [
    'speclen generate "def read_file(path):" --max-tokens 64',
    "speclen tables",
    "sqlite-utils rows .speclen/speclen.db choices --table",
]


@pytest.mark.timeout(300)
def test_the_commands_of_the_readme_work_and_fit_the_terminal(serving):
    assert len(serving.run("sh", "-c", COMMANDS[0])) > 20
    until(lambda: "ms/token" in serving.run("sh", "-c", COMMANDS[1]), what="a learned table")
    assert max(map(len, serving.run("sh", "-c", COMMANDS[1]).splitlines())) <= 80
    choices = serving.run("sh", "-c", COMMANDS[2])
    assert "ms_per_token" in choices


def test_the_program_of_the_grpc_reference_works(serving):
    program = PYTHON[0].replace("127.0.0.1:7080", serving.worker)
    assert program != PYTHON[0]
    assert len(serving.run("python", "-c", program)) > 20


PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text()


@pytest.fixture(scope="module")
def worker():
    pair = load_pair("bundled:target", "bundled:draft", "cpu")
    with http_worker(pair=pair, model="bundled:target", max_batch_size=8) as worker:
        yield worker


def blocks(language, worker):
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return [block.replace("http://127.0.0.1:8000", worker.url) for block in found]


def test_the_python_examples_of_the_http_reference_work(worker, capsys):
    names: dict = {}
    for block in blocks("python", worker):
        if "structured_outputs" in block and importlib.util.find_spec("llguidance") is None:
            continue  # an extra that this environment lacks
        exec(compile(block, "docs/reference/http.md", "exec"), names)  # noqa: S102
        assert capsys.readouterr().out.strip()
    assert names["answer"].usage.completion_tokens == 32


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_curl_examples_of_the_http_reference_work(worker):
    for block in blocks("bash", worker):
        done = subprocess.run(["bash", "-euc", block], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
        assert '"object":"text_completion"' in done.stdout
        assert '"count":' in done.stdout
