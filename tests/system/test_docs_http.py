"""The examples of the page about HTTP run."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from speclen.worker.models.loading import load_pair
from tests.support.http_worker import http_worker

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text()


@pytest.fixture(scope="module")
def worker():
    pair = load_pair("bundled:target", "bundled:draft", "cpu")
    with http_worker(pair=pair, model="bundled:target", max_batch_size=8) as worker:
        yield worker


def blocks(language, worker):
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return [block.replace("http://127.0.0.1:8000", worker.url) for block in found]


def test_python(worker, capsys):
    names: dict = {}
    for block in blocks("python", worker):
        if "structured_outputs" in block and importlib.util.find_spec("llguidance") is None:
            continue  # an extra that this environment lacks
        exec(compile(block, "docs/reference/http.md", "exec"), names)  # noqa: S102
        assert capsys.readouterr().out.strip()
    assert names["answer"].usage.completion_tokens == 32


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl(worker):
    for block in blocks("bash", worker):
        done = subprocess.run(["bash", "-euc", block], capture_output=True, text=True, check=True, timeout=60)
        assert '"object":"text_completion"' in done.stdout
        assert '"count":' in done.stdout
