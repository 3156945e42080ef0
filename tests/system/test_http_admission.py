"""HTTP goes through the same admission queue as gRPC: one queue, turns by caller, draining, and errors that are told."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from speclen.transport.credentials import ServerSecurity
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc
from speclen.worker.requests.request import EngineFailedError
from speclen.worker.requests.sequence import SequenceState
from tests.support.http_worker import HttpWorker, http_worker
from tests.support.waiting import until

ENDLESS = {"prompt": "a", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def worker() -> Iterator[HttpWorker]:
    with http_worker(max_batch_size=1, max_waiting=3) as worker:
        yield worker


def post(worker: HttpWorker, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{worker.url}/v1/completions", json=body, timeout=30)


def on_loop(worker: HttpWorker, function: Callable[..., None], *arguments: Any) -> None:
    """Call it on the worker's event loop, and wait for that."""
    done = threading.Event()
    assert worker.loop is not None
    worker.loop.call_soon_threadsafe(lambda: (function(*arguments), done.set()))
    assert done.wait(10)


def over_grpc(worker: HttpWorker) -> Any:
    with grpc.insecure_channel(worker.grpc) as channel:
        return list(rpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="a"), timeout=30))


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    *pieces, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


def test_requests_over_http_fill_the_queue_for_grpc_and_are_shown(worker: HttpWorker) -> None:
    hold(worker)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(post, worker, ENDLESS) for _ in range(4)]
        until(lambda: worker.async_engine.num_open == 4 and worker.engine.load().num_running == 1)
        with grpc.insecure_channel(worker.grpc) as channel:
            info = rpc.GenerationServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
        assert (info.num_requests_running, info.num_requests_waiting) == (1, 3)
        with pytest.raises(grpc.RpcError) as raised:
            over_grpc(worker)
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert post(worker, ENDLESS).status_code == 429
        release(worker)
        assert [answer.result().status_code for answer in answers] == [200] * 4
    until(lambda: worker.async_engine.num_open == 0)


def test_holders_of_keys_take_turns(tmp_path: Path) -> None:
    """All from one address. Before, the second one waited for everything that the first had sent."""
    keys = ["0123456789abcdef", "fedcba9876543210"]
    (tmp_path / "keys").write_text("\n".join(keys))
    security = ServerSecurity(token_file=tmp_path / "keys")
    with http_worker(max_batch_size=1, max_waiting=8, security=security) as worker, ThreadPoolExecutor(8) as pool:
        hold(worker)
        entered, fair_queue = admissions(worker), worker.async_engine.admission.fair_queue

        def ask(key: str) -> None:
            headers = {"Authorization": f"Bearer {key}"}
            body = ENDLESS | {"max_tokens": 2 + keys.index(key)}
            assert httpx.post(f"{worker.url}/v1/completions", json=body, headers=headers, timeout=30).status_code == 200

        tasks = []
        for number, key in enumerate([keys[0]] * 6 + [keys[1]]):
            tasks.append(pool.submit(ask, key))
            until(lambda number=number: len(entered) + fair_queue.num_waiting == number + 1)  # type: ignore[misc]
        release(worker)
        for task in tasks:
            task.result()
        assert entered.index(3) <= 3, "two are in the engine by then, and one of the first caller's is before it"


def test_every_prompt_has_its_turn(worker: HttpWorker) -> None:
    """All of them in one turn would go to the engine at once, past the queue's bound and ahead of other callers."""
    hold(worker)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, worker, ENDLESS | {"prompt": ["a"] * 4})
        until(lambda: worker.engine.load().num_running == 1)
        assert worker.engine.load().num_waiting == 1
        assert worker.async_engine.admission.num_waiting == 2
        release(worker)
        choices = answer.result().json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in choices}) == 1
    assert post(worker, ENDLESS | {"prompt": ["a"] * 5}).status_code == 429


@pytest.mark.parametrize("stream", [False, True])
def test_of_a_body_nothing_stays_that_its_answer_does_not_need(worker: HttpWorker, stream: bool) -> None:
    """Story: what was sent in 4 MB stayed as 90 MB of empty lists for as long as the request waited and was answered."""
    hold(worker)
    junk = {"stream": stream, "junk": [[]] * 100_000, "stream_options": {"junk": [[]] * 100_000} if stream else None}
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(post, worker, ENDLESS | junk) for _ in range(3)]
        until(lambda: worker.engine.load().num_running + worker.engine.load().num_waiting == 2)
        until(lambda: worker.async_engine.admission.num_waiting == 1)
        gc.collect()
        assert sum(type(one) is list and not one for one in gc.get_objects()) < 100_000
        release(worker)
        assert [answer.result().status_code for answer in answers] == [200] * 3


def test_draining_refuses_what_comes_and_finishes_what_waits(worker: HttpWorker) -> None:
    hold(worker)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(post, worker, ENDLESS | {"stream": index % 2 == 0}) for index in range(4)]
        until(lambda: worker.async_engine.num_open == 4)
        on_loop(worker, worker.async_engine.drain)
        refused = post(worker, ENDLESS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert httpx.get(f"{worker.url}/health").status_code == 503
        release(worker)
        assert [answer.result().status_code for answer in answers] == [200] * 4
    assert events(answers[0].result())[-1]["choices"][0]["finish_reason"] == "length"


def test_a_failed_engine_ends_what_runs_and_what_waits(worker: HttpWorker) -> None:
    worker.engine.step = lambda: time.sleep(0.01)  # type: ignore[assignment, method-assign, func-returns-value]
    with ThreadPoolExecutor(4) as pool:
        whole = [pool.submit(post, worker, ENDLESS) for _ in range(2)]
        streams = [pool.submit(post, worker, ENDLESS | {"stream": True}) for _ in range(2)]
        until(lambda: worker.async_engine.num_open == 4)
        time.sleep(0.1)  # for the streams to begin
        on_loop(worker, worker.async_engine.fail, EngineFailedError("the engine has failed"))
        errors = [answer.result().json()["error"] for answer in whole]
        errors += [events(answer.result())[-1]["error"] for answer in streams]
    assert [(error["code"], error["message"]) for error in errors] == [("engine_failed", "the engine has failed")] * 4
    assert {answer.result().status_code for answer in whole} == {503}
    assert post(worker, ENDLESS).json()["error"]["code"] == "engine_failed"
    assert httpx.get(f"{worker.url}/health").status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_step_fails_ends_with_an_error_and_the_next_one_is_served(
    worker: HttpWorker, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(worker.engine.runner, "launch", lambda plan: 1 / 0)
        answer = post(worker, ENDLESS | {"stream": stream})
    error = events(answer)[-1]["error"] if stream else answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "request_failed")
    assert error["message"] == "ZeroDivisionError: division by zero: the request has ended, try it again"
    assert answer.status_code == (200 if stream else 500)
    assert post(worker, ENDLESS | {"max_tokens": 3}).status_code == 200


def test_a_text_that_cannot_fit_is_refused_in_openais_words(worker: HttpWorker) -> None:
    error = post(worker, ENDLESS | {"prompt": "x" * 1_000_000}).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert error["message"].startswith("This model's maximum context length is 256 tokens")


def test_templates_are_filled_in_one_after_the_other_and_callers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number waited before, for threads that other work needs as well, and the last to come for all before it."""
    threads: list[str] = []

    def render(tokenizer: Any, conversation: list[dict[str, str]], *_: Any) -> str:
        threads.append(threading.current_thread().name)
        return conversation[0]["content"]

    monkeypatch.setattr("speclen.worker.http.chat.render", render)
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    with http_worker(max_batch_size=1, max_waiting=1) as worker, ThreadPoolExecutor(8) as pool:
        go_on, templates = threading.Event(), worker.async_engine.admission.templates
        blocking = asyncio.run_coroutine_threadsafe(templates.do("another", go_on.wait), worker.loop)
        asked = []
        for number in range(3):  # of which the one that comes third is refused
            path = "/tokenize" if number == 0 else "/v1/chat/completions"
            asked.append(pool.submit(httpx.post, f"{worker.url}{path}", json=body | {"max_tokens": 2}, timeout=30))
            until(lambda number=number: worker.async_engine.admission.num_waiting == min(number + 1, 2))  # type: ignore[misc]
        assert asked[2].result().status_code == 429
        go_on.set()
        assert [one.result().status_code for one in asked[:2]] == [200, 200]
        assert blocking.result(10)
    assert [name.partition("_")[0] for name in threads] == ["templates"] * 2


def hold(worker: HttpWorker) -> None:
    """Let the engine admit requests and compute nothing more, until `release`."""
    go, launch = threading.Event(), worker.engine.runner.launch

    def wait_and_launch(plan: Any) -> Any:
        assert go.wait(30)
        return launch(plan)

    worker.engine.runner.launch = wait_and_launch  # type: ignore[method-assign]
    worker.go = go  # type: ignore[attr-defined]


def admissions(worker: HttpWorker) -> list[int]:
    """The `max_tokens` of every request that enters the engine from now on, in order."""
    entered: list[int] = []
    take = worker.engine.take

    def note_and_take(sequences: Sequence[SequenceState]) -> None:
        entered.extend(one.request.sampling.max_tokens for one in sequences)
        take(sequences)

    worker.engine.take = note_and_take  # type: ignore[method-assign]
    return entered


def release(worker: HttpWorker) -> None:
    worker.go.set()  # type: ignore[attr-defined]
