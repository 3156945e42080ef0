"""The service in front of a real engine: refusals, waiting, and clients that do not read."""

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from speclen.process.credentials import Keyring
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc
from speclen.worker.frontend.async_engine import AsyncEngine
from speclen.worker.frontend.generation_servicer import caller_of
from speclen.worker.requests.request import GenerationRequest
from tests.support import engines
from tests.support.served import ENDLESS, sampled, served, tokenized
from tests.support.waiting import on_loop_until as until


@pytest.mark.parametrize(
    ("request_", "details"),
    [
        (pb.GenerateRequest(), "input is missing"),
        (pb.GenerateRequest(text="a", request_id="x" * 129), "request_id has 129 characters"),
        # Once something was made for each sequence before the number was looked at: one message ended the worker.
        (sampled(n=2**32 - 1), "n is 4294967295"),
        (pb.GenerateRequest(text="x" * 1_000_000), "text has 4096 tokens in its first"),
        (sampled(n=64, logprobs=20, max_tokens=2**32 - 1), "326400 entries, at most 250000"),
        (pb.GenerateRequest(text="ab " * 1000), r"prompt has \d+ tokens"),
        # Copied first, a message of 4 MiB held up the event loop for seconds: a set of millions for each of 64 sequences.
        (sampled(n=64, stop_token_ids=[1] * 2_000_000), "stop_token_ids has 2000000 entries, at most 1024 are allowed"),
        (sampled(stop=[""] * 1_000_000), "stop has 1000000 entries, at most 64"),
        (sampled(logit_bias=dict.fromkeys(range(1025), 0.0)), "logit_bias has 1025 entries, at most 1024"),
    ],
)
async def test_what_is_wrong_is_named(request_, details):
    async with served() as at:
        code, said = await at.fails(request_)
        assert code == "INVALID_ARGUMENT"
        assert re.search(details, said), said
        assert at.async_engine.num_open == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_reads_nothing_loses_its_slot_and_gets_the_reason(stream):
    """Its window of 16 kB holds some messages of a stream, but not the first of a whole answer."""
    async with served(unread_timeout_s=0.3, rows=1) as at, narrow_channel(at.port) as stub:
        sampling = pb.SamplingParams(max_tokens=150, ignore_eos=True, logprobs=20, n=2)
        call = stub.Generate(tokenized(1, sampling_params=sampling, stream=stream), timeout=30)
        await until(lambda: at.num_slow_readers() == 1)
        await until(lambda: at.engine.load().num_running == 0)
        assert (await at.all(tokenized(1)))[-1].HasField("complete")
        with pytest.raises(aio.AioRpcError) as raised:
            [response async for response in call]
        assert raised.value.code().name == "ABORTED"
        assert "nothing was read for 0.3 s" in (raised.value.details() or "")
        await until(lambda: at.async_engine.num_open == 0)


@contextlib.asynccontextmanager
async def narrow_channel(port: int) -> AsyncIterator[Any]:
    """A client that lets the server send 16 kB ahead, not 4 MB."""
    options = [("grpc.http2.lookahead_bytes", 16_384), ("grpc.http2.bdp_probe", 0)]
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield rpc.GenerationServiceStub(channel)


async def tokens_of(engine: AsyncEngine, request: GenerationRequest, caller: str) -> int:
    """Tokens that a request of this caller gets."""
    async with engine.open(uuid.uuid4().hex) as stream, engine.running([request], stream, caller, 0.0) as outputs:
        return sum([len(output.token_ids) async for group in outputs for output in group])


async def test_two_requests_of_one_name_do_not_wait_for_each_other():
    """Over HTTP a request's name is not that of its call. The second request was once never answered."""
    async with served(rows=1) as at:
        engine = at.async_engine
        tasks = [asyncio.create_task(at.all(tokenized(1, 2, sampling_params=ENDLESS))) for _ in range(2)]
        await until(lambda: engine.num_open == 2 and at.engine.load().num_running + at.engine.load().num_waiting == 2)
        twice = engines.request("cmpl-0", [1, 2], max_tokens=4)
        first = asyncio.create_task(tokens_of(engine, twice, "c"))
        await until(lambda: engine.admission.num_waiting == 1)
        with pytest.raises(ValueError, match="'cmpl-0' is already running: choose another"):
            await tokens_of(engine, twice, "c")
        assert await first == 4
        await asyncio.gather(*tasks)


async def test_a_slow_reader_holds_no_slot_once_the_engine_is_done():
    async with served(rows=1) as at:
        engine, sampling = at.async_engine, {"max_tokens": 2, "ignore_eos": True}
        unread = engines.request("unread", [1, 2], n=2, **sampling)  # one has the row, and one waits in the engine
        async with engine.open("unread") as stream, engine.running([unread], stream, "slow", 0.0) as outputs:
            assert await tokens_of(engine, engines.request("other", [1, 2], **sampling), "other") == 2
            assert sum([len(output.token_ids) async for group in outputs for output in group]) == 4


async def test_a_request_of_64_sequences_does_not_delay_others():
    """Story: it took 64 places, and others waited until nearly all of them had ended."""
    async with served(rows=2) as at:
        sampling = {"max_tokens": 4, "ignore_eos": True}
        many = asyncio.create_task(
            tokens_of(at.async_engine, engines.request("many", [1, 2], n=64, **sampling), "many")
        )
        await until(lambda: at.engine.load().num_running == 2)
        others = [engines.request(name, [1, 2], **sampling) for name in ("b", "c")]
        assert await asyncio.gather(*(tokens_of(at.async_engine, one, one.request_id) for one in others)) == [4, 4]
        assert not many.done()
        assert await many == 64 * 4


class FakeContext:
    def __init__(self, peer: str, names: list[bytes] | None = None, token: str = "") -> None:
        self._peer, self._names, self._token = peer, names, token

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {self._token}")] if self._token else []

    def peer(self) -> str:
        return self._peer

    def peer_identities(self) -> list[bytes] | None:
        return self._names


HERE, KEYS = "ipv4:10.0.0.1:5000", Keyring(["a" * 20, "b" * 20])


@pytest.mark.parametrize(
    ("context", "keyring", "caller"),
    [
        (FakeContext(HERE), None, "ipv4:10.0.0.1"),
        (FakeContext("ipv6:%5B::1%5D:5000"), None, "ipv6:%5B::1%5D"),
        (FakeContext("unix:/tmp/socket"), None, "unix:/tmp/socket"),
        (FakeContext(HERE, [b"alice"]), None, "alice"),
        (FakeContext(HERE, [b"alice"], "a" * 20), KEYS, "alice"),
        (FakeContext(HERE, token="a" * 20), Keyring(["a" * 20]), "ipv4:10.0.0.1"),  # which everybody has
    ],
)
def test_callers_are_identified_by_name_or_address(context, keyring, caller):
    assert caller_of(context, keyring) == caller


def test_callers_with_tokens_are_identified_by_their_token():
    first, second, elsewhere = (
        caller_of(FakeContext(peer, token=letter * 20), KEYS)
        for peer, letter in ((HERE, "a"), (HERE, "b"), ("ipv4:10.0.0.2:6000", "a"))
    )
    assert first == elsewhere != second


async def test_an_internal_error_is_counted_and_its_text_is_not_sent(monkeypatch):
    """Story: gRPC sent it as UNKNOWN, with its text."""

    def fail(*_: object) -> None:
        raise RuntimeError("secret")

    async with served() as at:
        with monkeypatch.context() as broken, capture_logs() as logs:
            broken.setattr("speclen.worker.frontend.generation_servicer.by_sequence", fail)
            said = await at.fails(tokenized(1))
        assert said == ("INTERNAL", "the worker failed to answer; its log says why")
        (told,) = [line for line in logs if line["log_level"] == "error"]
        assert told["exc_info"]
        page = generate_latest(at.metrics.registry).decode()
        assert 'speclen_request_refused_total{reason="internal"} 1.0' in page
        await until(lambda: at.async_engine.num_open == 0)
        assert (await at.all(tokenized(1)))[-1].HasField("complete")
