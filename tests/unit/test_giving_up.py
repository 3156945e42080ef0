"""Requests that are aborted, cancelled or failed end at once, with the right status, and free their slots."""

import asyncio
import threading
from unittest import mock

import pytest
from grpc import aio
from prometheus_client import generate_latest

from speclen.v1 import generation_pb2 as pb
from tests.support.served import ENDLESS, held, served, tokenized
from tests.support.waiting import on_loop_until as until


async def test_abort_ends_running_and_waiting_requests():
    async with served(rows=1) as at:
        names = ["runs", "ahead", "waits", "waits, too"]  # one has the row, and one waits in the engine
        tasks = []
        for number, name in enumerate(names):
            tasks.append(asyncio.create_task(at.all(tokenized(1, 2, request_id=name, sampling_params=ENDLESS))))
            await until(lambda number=number: at.async_engine.num_open == number + 1)
        await until(lambda: at.async_engine.admission.num_waiting == 2)
        wanted = pb.AbortRequest(request_ids=["waits", "runs", "nobody", "waits"])
        assert (await at.stub.Abort(wanted)).num_aborted == 2
        answers = [(await task)[-1].complete for task in tasks]
        aborted, whole = pb.FINISH_REASON_ABORT, pb.FINISH_REASON_LENGTH
        assert [answer.finish_reason for answer in answers] == [aborted, whole, aborted, whole]
        assert answers[2].usage.prompt_tokens == 2
        page = generate_latest(at.metrics.registry).decode()
        assert 'speclen_request_success_total{finished_reason="abort"} 2.0' in page
        assert at.async_engine.num_open == 0


async def test_abort_ends_a_request_that_is_being_tokenized():
    async with served() as at:
        go_on, encoder = threading.Event(), at.async_engine.admission.encoder
        other = asyncio.create_task(encoder.long_texts.do("other", go_on.wait))  # another's text is in hand
        long = pb.GenerateRequest(text="a " * 60, sampling_params=ENDLESS, request_id="long", stream=True)
        with mock.patch("speclen.worker.frontend.admission.SHORT_BYTES", 10):
            task = asyncio.create_task(at.all(long))
            await until(lambda: at.async_engine.num_open == 1)
            wanted = pb.AbortRequest(request_ids=["long"])
            assert (await at.stub.Abort(wanted)).num_aborted == 1
            go_on.set()
            answers = await task
        assert answers[-1].complete.finish_reason == pb.FINISH_REASON_ABORT
        assert at.engine.load().num_generated_tokens == 0
        assert await other
        assert (await at.stub.Abort(wanted)).num_aborted == 0


async def test_a_cancelled_request_id_can_be_reused_at_once():
    """The engine knew the id until its running step had ended, and the second try was wrong: INVALID_ARGUMENT."""
    async with served(rows=1) as at:
        request = tokenized(1, request_id="mine", sampling_params=pb.SamplingParams(max_tokens=3))
        with held(at.engine) as go_on:
            with pytest.raises(aio.AioRpcError) as raised:
                [response async for response in at.stub.Generate(request, timeout=0.3)]
            assert raised.value.code().name == "DEADLINE_EXCEEDED"
            again = asyncio.create_task(at.all(request))
            await asyncio.sleep(0.2)
            assert not again.done()
            assert at.engine.load().num_running == 1
            go_on.set()
            assert (await again)[-1].complete.usage.completion_tokens == 3


async def test_an_abort_of_too_many_is_refused():
    async with served() as at:
        assert (await at.stub.Abort(pb.AbortRequest(request_ids=[""] * 1024))).num_aborted == 0
        with pytest.raises(aio.AioRpcError) as raised:
            await at.stub.Abort(pb.AbortRequest(request_ids=[""] * 1025))
        said = "request_ids has 1025 entries, at most 1024 are allowed"
        assert (raised.value.code().name, raised.value.details()) == ("INVALID_ARGUMENT", said)
