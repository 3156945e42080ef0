"""The cases of `scripts/clients_check` against the bundled pair: the official client, and a crowd."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from speclen.bench.clients.check import OPTIONS, PROGRAMS
from speclen.bench.clients.crowd import Crowd, disconnects, streams
from speclen.bench.clients.openai_cases import CASES
from speclen.transport.credentials import ServerSecurity
from speclen.worker.config import WorkerConfig
from speclen.worker.http.server import allow_many_files
from speclen.worker.models.loading import load_pair
from tests.support.http_worker import KEY, HttpWorker, http_worker

MODEL = "bundled:target"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpWorker]:
    file: Path = tmp_path_factory.mktemp("keys") / "key"
    file.write_text(KEY)
    pair = load_pair(MODEL, "bundled:draft", "cpu")
    with http_worker(
        pair=pair, model=MODEL, max_batch_size=16, max_waiting=32, security=ServerSecurity(token_file=file)
    ) as worker:
        yield worker


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_with_the_official_client(worker: HttpWorker, case: Callable[[openai.OpenAI, str], None]) -> None:
    structured = "pars" in case.__name__ or "struct" in case.__name__ or "json" in case.__name__
    if structured and importlib.util.find_spec("llguidance") is None:
        pytest.skip("the extra grammar is not installed")
    case(worker.client(), MODEL)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_programs_worker_would_start(program: str) -> None:
    """Once a bound was raised above what schemathesis' worker asked for, which nobody saw until the next full run."""
    names = [flag.removeprefix("--").replace("-", "_") for flag in OPTIONS.get(program, [])[::2]]
    WorkerConfig(**dict(zip(names, map(int, OPTIONS.get(program, [])[1::2]), strict=True)))  # type: ignore[arg-type]


def test_with_a_crowd(worker: HttpWorker) -> None:
    """Smaller than that of `scripts/clients_check`; what it leaves in this process's memory is not looked at."""
    allow_many_files()
    crowd = Crowd(worker.http, KEY)
    for passed, told in (
        asyncio.run(streams(crowd, 100)),
        asyncio.run(disconnects(crowd, 200)),
        asyncio.run(streams(crowd, 100)),
    ):
        assert passed, told
