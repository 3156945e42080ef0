"""A stream over HTTP while its request waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from speclen.worker.http.answers import Answer
from speclen.worker.http.responses import DONE, STILL_HERE, JobResponse
from speclen.worker.http.schema import CompletionRequest
from speclen.worker.http.translate import completion_job
from tests.support import tiny_models
from tests.support.served import held, served
from tests.support.waiting import on_loop_until as until


async def test_a_waiting_stream_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speclen.worker.http.responses.SILENCE_S", 0.01)
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    body = CompletionRequest(prompt=[1, 2], max_tokens=2, stream=True)
    async with served() as at:

        async def make_answer() -> Answer:
            return Answer(await completion_job(body, at.async_engine, "c"), "tiny", tiny_models.tokenizer())

        with held(at.engine) as go_on:
            answering = asyncio.create_task(
                JobResponse(body, at.async_engine, "c", make_answer)({"type": "http"}, receive, send)
            )
            await until(lambda: sent.count(STILL_HERE) >= 2)
            go_on.set()
            await answering
    events = [one for one in sent if one not in (b"", STILL_HERE)]
    assert events[-1] == DONE
    assert b'"finish_reason":"length"' in events[-2]
    assert sent.index(STILL_HERE) < sent.index(events[0])
