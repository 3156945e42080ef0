"""The cases of `scripts/clients_check` against the bundled pair: the official client, and a crowd."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from speclen.bench.clients.check import OPTIONS
from speclen.bench.clients.crowd import Crowd, disconnects, streams
from speclen.bench.clients.openai_cases import CASES, MODEL, STRUCTURED, Case
from speclen.transport.credentials import ServerSecurity
from speclen.worker.config import WorkerConfig
from speclen.worker.http.server import allow_many_files
from speclen.worker.models.loading import load_pair
from tests.support.http_worker import KEY, HttpWorker, http_worker


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpWorker]:
    file: Path = tmp_path_factory.mktemp("keys") / "key"
    file.write_text(KEY)
    pair = load_pair("bundled:target", "bundled:draft", "cpu")
    with http_worker(
        pair=pair, model=MODEL, max_batch_size=16, max_waiting=32, security=ServerSecurity(token_file=file)
    ) as worker:
        yield worker


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_with_the_official_client(worker: HttpWorker, case: Case) -> None:
    assert case(worker.client())


@pytest.mark.parametrize("case", STRUCTURED.values(), ids=STRUCTURED)
def test_structured_output_with_the_official_client(worker: HttpWorker, case: Case) -> None:
    pytest.importorskip("llguidance")
    assert case(worker.client())


@pytest.mark.parametrize("program", OPTIONS)
def test_every_programs_worker_would_start(program: str) -> None:
    """Once a bound was raised above what schemathesis' worker asked for, which nobody saw until the next full run."""
    WorkerConfig(**OPTIONS[program])  # type: ignore[arg-type]


def test_with_a_crowd(worker: HttpWorker) -> None:
    """Smaller than that of `scripts/clients_check`. Raises where something is left behind."""
    allow_many_files()
    crowd = Crowd(worker.http, KEY)
    for act in (streams(crowd, 100), disconnects(crowd, 200), streams(crowd, 100)):
        assert asyncio.run(act)
