"""The page about HTTP: its examples run, and it names every field, status and metric that there is."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from speclen.worker.http.openapi import STATUSES
from speclen.worker.http.schema import UNSUPPORTED, ChatRequest, CompletionRequest
from speclen.worker.models.loading import load_pair
from speclen.worker.observing.request_metrics import REASONS
from speclen.worker.observing.tracing import Origin, RequestTrace, attributes
from speclen.worker.requests.request import GenerationRequest, SamplingParams
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


def test_every_field_is_named():
    fields = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
    assert not {name for name in fields if f"`{name}`" not in PAGE}
    assert not set(re.findall(r"`(\w+)`", PAGE.partition("are refused")[0][-100:])) - {*UNSUPPORTED}


def test_every_status_is_named():
    table = PAGE.partition("## Errors")[2].partition("\n## ")[0]
    assert {int(number) for number in re.findall(r"\b\d{3}\b", table)} >= STATUSES.keys()


def test_every_attribute_of_a_span_is_named():
    request = GenerationRequest("r", (1,), SamplingParams(seed=1), fixed_length=1)
    made = attributes(RequestTrace(None, request, Origin(), 0.0), "m")
    table = PAGE.partition("## Traces")[2].partition("\n## ")[0]
    named = set(re.findall(r"`((?:gen_ai|speclen|error)\.[a-z_.]+)`", table))
    assert named == {*made, "error.type"}


def test_every_metric_is_named_and_exists(worker):
    httpx.post(f"{worker.url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
    lines = httpx.get(f"{worker.url}/metrics").text.splitlines()
    families = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    ours = {name.removeprefix("speclen_") for name in families if name.startswith("speclen_")}
    ours = {name for name in ours if not name.endswith("_created")}
    table = PAGE.partition("## Metrics")[2].partition("\n## ")[0]
    named = {name.partition("{")[0] for name in re.findall(r"`([a-z0-9_]+(?:\{[^}]*\})?)`", table)}
    assert not ours - named
    assert not named - ours - {"model_name", "python_info", "speclen_", "stop", "length", "abort", *REASONS}
