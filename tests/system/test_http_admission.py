"""HTTP goes through the same admission queue as gRPC: one queue, turns by caller, draining, and errors."""

import gc
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest

from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc
from tests.support.http_worker import http_worker, over_grpc, post
from tests.support.served import held
from tests.support.waiting import PATIENCE_S, until

ENDLESS = {"prompt": "a", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def worker():
    with http_worker(max_batch_size=1, max_waiting=3) as worker:
        yield worker


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    *pieces, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


def test_http_and_grpc_share_one_queue(worker):
    with held(worker.engine) as go_on, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(post, worker, ENDLESS) for _ in range(4)]
        until(lambda: worker.async_engine.num_open == 4 and worker.engine.load().num_running == 1)
        with grpc.insecure_channel(worker.grpc) as channel:
            info = rpc.GenerationServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=PATIENCE_S)
        assert (info.num_requests_running, info.num_requests_waiting) == (1, 3)
        with pytest.raises(grpc.RpcError) as raised:
            over_grpc(worker)
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert post(worker, ENDLESS).status_code == 429
        go_on.set()
        assert [answer.result().status_code for answer in answers] == [200] * 4
    until(lambda: worker.async_engine.num_open == 0)


def test_each_prompt_of_a_request_takes_its_own_turn(worker):
    """All of them in one turn would go to the engine at once, past the queue's bound and ahead of other callers."""
    with held(worker.engine) as go_on, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, worker, ENDLESS | {"prompt": ["a"] * 4})
        until(lambda: worker.engine.load().num_running == 1)
        assert worker.engine.load().num_waiting == 1
        assert worker.async_engine.admission.num_waiting == 2
        go_on.set()
        choices = answer.result().json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in choices}) == 1
    assert post(worker, ENDLESS | {"prompt": ["a"] * 5}).status_code == 429


@pytest.mark.parametrize("stream", [False, True])
def test_a_waiting_request_keeps_nothing_of_its_body(worker, stream):
    """Story: a body of 4 MB was kept as 90 MB of empty lists until the request was answered."""
    junk = {"stream": stream, "junk": [[]] * 100_000, "stream_options": {"junk": [[]] * 100_000} if stream else None}
    with held(worker.engine) as go_on, ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(post, worker, ENDLESS | junk) for _ in range(3)]
        until(lambda: worker.engine.load().num_running + worker.engine.load().num_waiting == 2)
        until(lambda: worker.async_engine.admission.num_waiting == 1)
        gc.collect()
        assert sum(type(one) is list and not one for one in gc.get_objects()) < 100_000
        go_on.set()
        assert [answer.result().status_code for answer in answers] == [200] * 3


def test_draining_refuses_new_requests_and_finishes_waiting_ones(worker):
    with held(worker.engine) as go_on, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(post, worker, ENDLESS | {"stream": index % 2 == 0}) for index in range(4)]
        until(lambda: worker.async_engine.num_open == 4)
        worker.loop.call_soon_threadsafe(worker.async_engine.drain)
        until(lambda: httpx.get(f"{worker.url}/health").status_code == 503)
        refused = post(worker, ENDLESS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        go_on.set()
        assert [answer.result().status_code for answer in answers] == [200] * 4
    assert events(answers[0].result())[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_step_fails_ends_with_an_error_and_the_next_one_is_served(worker, monkeypatch, stream):
    with monkeypatch.context() as broken:
        broken.setattr(worker.engine.runner, "launch", lambda plan: 1 / 0)
        answer = post(worker, ENDLESS | {"stream": stream})
    error = events(answer)[-1]["error"] if stream else answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "request_failed")
    assert error["message"] == "ZeroDivisionError: division by zero: the request has ended, try it again"
    assert answer.status_code == (200 if stream else 500)
    assert post(worker, ENDLESS | {"max_tokens": 3}).status_code == 200
