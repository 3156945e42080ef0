"""Parts of a fleet on Ray that need no Ray: settings, room, calls through the proxy, both programs in its processes.

With Ray itself: scripts/fleet_check.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
from structlog.testing import capture_logs

from speclen.cli.app import with_ray_address
from speclen.cli.support.errors import UserError
from speclen.cli.up.up import OF_FLEETS, refuse_without_ray
from speclen.integrations.ray.calls import CallEndedError, ServeCall, check_token
from speclen.integrations.ray.hosting import RefusedError
from speclen.integrations.ray.serving import ServedWorker, follow_controller, guarded
from speclen.integrations.ray.settings import FleetConfig, check_reachable, fleet_from
from speclen.transport.keyring import Keyring
from speclen.v1 import control_pb2_grpc
from speclen.v1 import generation_pb2 as pb
from speclen.worker.config import WorkerConfig
from tests.support.control_fakes import registration
from tests.support.store_rows import rows

PATIENCE_S = 60.0


class FakeContext:
    """Serve's gRPC context, as far as it is used."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self.metadata, self.code, self.details = metadata, None, ""

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, metadata: Any) -> None:
        self.trailing = metadata

    def invocation_metadata(self) -> Any:
        return self.metadata

    def peer(self) -> str:
        return "ipv4:10.0.0.1:5000"


# Settings.


def test_arguments_of_serve_run_become_settings_by_their_type(tmp_path):
    config = fleet_from({"workers": "2", "max-workers": "4", "data_dir": str(tmp_path), "target": "t", "threads": "1"})
    assert (config.workers, config.most_workers, config.data_dir) == (2, 4, tmp_path)
    assert config.worker_config({}).threads == 1
    assert config.worker_config({"SPECLEN_WORKER_THREADS": "3"}).threads == 3  # a node's own word is the last


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"worker": "2"}, "did you mean workers"),
        ({"listen": "127.0.0.1:1"}, "listen"),
        ({"workers": "two"}, "'two'; it must be a number"),
        ({"workers": "0"}, "--workers is 0"),
        ({"workers": "3", "max_workers": "2"}, "--max-workers 2"),
        ({"insecure": "maybe"}, "true or false"),
        ({"policy": "best"}, "--policy 'best'"),
        ({"controller_cert": "c.pem"}, "belong together"),
        ({"metrics_listen": "0.0.0.0:9070"}, "--metrics-listen 0.0.0.0:9070 is open"),
    ],
)
def test_arguments_that_cannot_work_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        fleet_from(arguments)


def test_a_controller_that_others_reach_must_be_protected(tmp_path):
    config = FleetConfig()
    assert config.controller_config("127.0.0.1", {}).listen == "127.0.0.1:7070"
    with pytest.raises(ValueError, match="open to other machines"):
        config.controller_config("10.0.0.5", {})
    assert FleetConfig(insecure=True).controller_config("10.0.0.5", {}).insecure
    assert FleetConfig(metrics_listen="[::1]:9070").controller_config("127.0.0.1", {}).metrics_listen == "[::1]:9070"
    # As docs/guides/fleet.md has it: its certificate by flags, the token by the environment of the nodes.
    assert {"controller_cert", "controller_key"} <= set(OF_FLEETS)
    cert, key, token = (tmp_path / name for name in ("cert", "key", "token"))
    guarded = FleetConfig(controller_cert=cert, controller_key=key)
    told = guarded.controller_config("10.0.0.5", {"SPECLEN_WORKER_CONTROLLER_TOKEN_FILE": str(token)})
    assert (told.tls_cert, told.tls_key, told.token_file) == (cert, key, token)


def test_ray_may_go_without_its_address():
    assert with_ray_address(["up", "--ray"]) == ["up", "--ray", "auto"]
    assert with_ray_address(["up", "--ray", "--workers", "2"]) == ["up", "--ray", "auto", "--workers", "2"]
    assert with_ray_address(["up", "--ray", "h:6379"]) == ["up", "--ray", "h:6379"]
    assert with_ray_address(["worker", "--ray"]) == ["worker", "--ray"]


def test_what_only_ray_can_follow_is_refused_without():
    refuse_without_ray({"max_workers": 0, "cpus_per_worker": 1.0})
    with pytest.raises(UserError, match="--max-workers 4 needs --ray"):
        refuse_without_ray({"max_workers": 4})


def test_no_cluster_at_the_address_is_told_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        check_reachable(address)
    with pytest.raises(ValueError, match=f"no Ray cluster at {address}"):
        check_reachable(address)
    with pytest.raises(ValueError, match="--ray 'nonsense' is not HOST:PORT"):
        check_reachable("nonsense")


# Calls.


def collected(call: ServeCall, work: Any) -> Any:
    async def collect() -> list[Any]:
        return [message async for message in call.messages(work)]

    return asyncio.run(collect())


def test_messages_pass_in_order_and_wait_for_their_reader():
    written: list[int] = []
    call = ServeCall(FakeContext())

    async def work() -> None:
        for number in range(5):
            await call.write(number)
            written.append(number)

    async def read() -> None:
        seen = []
        async for message in call.messages(work()):
            seen.append(message)
            await asyncio.sleep(0.01)
            assert written == seen[:-1]  # the writer is not ahead of who reads
        assert seen == list(range(5))

    asyncio.run(read())


def test_a_call_that_is_aborted_has_its_status_and_what_came_before():
    outer = FakeContext()
    call = ServeCall(outer)

    async def work() -> None:
        await call.write(1)
        await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    with pytest.raises(CallEndedError, match="RESOURCE_EXHAUSTED: full"):
        collected(call, work())
    assert (outer.code, outer.details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


def test_a_caller_who_goes_away_ends_the_work():
    ended = asyncio.Event()

    async def leave() -> None:
        call = ServeCall(FakeContext())

        async def work() -> None:
            try:
                while True:
                    await call.write(1)
            finally:
                ended.set()

        messages = call.messages(work())
        await anext(messages)
        await messages.aclose()
        assert ended.is_set()

    asyncio.run(leave())


def test_a_wrong_token_is_refused_before_anything_is_done():
    keyring = Keyring(["0123456789abcdef"])
    check_token(None, FakeContext(), insecure=True)
    check_token(keyring, FakeContext(("authorization", "Bearer 0123456789abcdef")), insecure=False)
    for known, metadata in ((keyring, ()), (keyring, (("authorization", "Bearer wrong"),)), (None, ())):
        outer = FakeContext(*metadata)
        with pytest.raises(CallEndedError):
            check_token(known, outer, insecure=False)
        assert outer.code is grpc.StatusCode.UNAUTHENTICATED


# The controller inside a process of Ray's.


# In a process of its own, as on Ray: it answers with an address or in words, until its input ends.
HOSTED = """
import json, sys
from pathlib import Path
from speclen.controller.config import ControllerConfig
from speclen.integrations.ray.hosting import HostedController, RefusedError
from speclen.transport.logs import set_up_logs
set_up_logs()
folder, options = sys.argv[1], json.loads(sys.argv[2])
exec(sys.argv[3])
controller = HostedController(ControllerConfig(listen="127.0.0.1:0", data_dir=Path(folder)), **options)
controller.start()
for line in sys.stdin:
    try:
        print("at", controller.address(float(line)), sep=": ", flush=True)
    except ValueError as error:
        print("never" if isinstance(error, RefusedError) else "not yet", error, sep=": ", flush=True)
controller.stop()
sys.exit(1 if controller.error else 0)
"""


class Hosted:
    """A controller as an actor of Ray's holds it. broken: code that breaks something of it, or sets it up otherwise."""

    def __init__(self, folder: Path, broken: str = "", **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOSTED, str(folder), json.dumps(options), broken],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def address(self, timeout_s: float = PATIENCE_S) -> str:
        """Raises what the controller raises."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{timeout_s}\n")
        self.process.stdin.flush()
        word, _, rest = self.process.stdout.readline().strip().partition(": ")
        if word != "at":
            raise (RefusedError if word == "never" else ValueError)(rest)
        return rest

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.communicate(timeout=PATIENCE_S)


@contextlib.contextmanager
def hosted(folder: Path, **options: Any) -> Iterator[Hosted]:
    controller = Hosted(folder, **options)
    try:
        yield controller
    finally:
        controller.stop()


def register(address: str) -> Any:
    with grpc.insecure_channel(address) as channel:
        return control_pb2_grpc.ControlServiceStub(channel).RegisterWorker(registration(), timeout=PATIENCE_S)


def test_a_successor_waits_for_what_its_predecessor_still_holds(tmp_path):
    with hosted(tmp_path) as first:
        first.address()
        with hosted(tmp_path, patient=True) as second:
            with pytest.raises(ValueError, match="did not serve within") as waiting:
                second.address(0.5)
            assert waiting.type is ValueError
            first.stop()
            assert second.address()


BROKEN_START = """
from speclen.store.database import Store
def load(self): raise {error}
Store.load = load
"""
WITH_PAGE = """
import functools
ControllerConfig = functools.partial(ControllerConfig, metrics_listen="{page}")
"""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("RuntimeError('of another kind')", "RuntimeError: of another kind"),
        ("OSError('busy')", "^busy"),
        ("OSError", "OSError"),  # it has no words of its own
    ],
)
def test_what_cannot_start_says_so_whatever_the_reason(tmp_path, error, words):
    """Story: an error that nobody had thought of ended the thread, and the actor lived on without a controller."""
    with (
        hosted(tmp_path, broken=BROKEN_START.format(error=error)) as controller,
        pytest.raises(RefusedError, match=words),
    ):
        controller.address()


def test_its_metrics_page_ends_with_it_and_is_no_failure(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        page = f"127.0.0.1:{probe.getsockname()[1]}"
    with hosted(tmp_path, broken=WITH_PAGE.format(page=page)) as controller:
        register(controller.address())
        assert "speclen_controller_workers 1.0" in httpx.get(f"http://{page}/metrics").text
    assert controller.process.returncode == 0
    assert rows(tmp_path / "speclen.db", "SELECT worker_id FROM workers") == [("w",)]


def wait_until(holds: Any) -> None:
    async def look() -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                await asyncio.sleep(0.05)

    asyncio.run(look())


# A worker inside a process of Ray's.


def asked(config: WorkerConfig, path: str) -> httpx.Response:
    """The answer of a worker's HTTP front, without a model."""
    engine = SimpleNamespace(serving=True, max_sequence_tokens=1)
    engine.admission = SimpleNamespace(encoder=SimpleNamespace(tokenizer=None))
    engine.engine = SimpleNamespace(pair=SimpleNamespace(target_name="t"))
    engine.metrics = SimpleNamespace(refuse=lambda reason: None)

    async def ask() -> httpx.Response:
        front: Any = guarded(config, engine)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://ray") as client:
            return await client.get(path)

    return asyncio.run(ask())


def test_without_a_token_nobody_is_answered_over_http_either():
    assert asked(WorkerConfig(), "/v1/models").status_code == 401
    assert asked(WorkerConfig(insecure=True), "/v1/models").status_code == 200


def test_one_address_of_many_workers_has_no_metrics():
    """Story: each look was at some worker, and the counters of all of them were taken for one that jumped."""
    answer = asked(WorkerConfig(insecure=True), "/metrics")
    assert answer.status_code == 404
    assert "several workers answer at this address" in answer.json()["error"]["message"]


def test_a_controller_that_does_not_answer_is_told_with_words():
    async def find() -> str:
        raise TimeoutError

    async def scenario() -> str:
        control: Any = None  # nothing is reported while no controller is found
        with capture_logs() as logs:
            following = asyncio.create_task(follow_controller(control, WorkerConfig(), find))
            async with asyncio.timeout(PATIENCE_S):
                while not logs:
                    await asyncio.sleep(0.01)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        return str(logs[0]["reason"])

    assert asyncio.run(scenario()) == "TimeoutError"


def test_a_worker_serves_both_edges_and_follows_a_controller_that_moves(tmp_path):
    """One worker: its calls by gRPC's and by OpenAI's edge give the same text; its controller is started elsewhere."""
    where = SimpleNamespace(address="")

    async def find() -> str:
        if not where.address:
            raise RuntimeError("the actor is being started again")
        return str(where.address)

    async def scenario() -> None:
        config = WorkerConfig(
            threads=1, backend="torch", max_batch_size=4, worker_id="ray:test", drain_timeout_s=5.0, insecure=True
        )
        worker = await ServedWorker.start(config, config.worker_id, find)
        end_of_process: list[str] = []
        watching = asyncio.create_task(worker.until_failed(lambda: end_of_process.append("now")))
        try:
            request = pb.GenerateRequest(text="def f(", sampling_params=pb.SamplingParams(max_tokens=8), stream=True)
            answers = [message async for message in worker.generate(request, FakeContext())]
            async with httpx.AsyncClient(transport=httpx.ASGITransport(worker.http), base_url="http://ray") as client:
                body = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}
                whole = (await client.post("/v1/completions", json=body)).json()
            assert whole["choices"][0]["text"] == answers[-1].complete.text != ""
            # In threads: a loop that waits for a process as long as a busy machine needs is taken for one that hangs.
            for name in ("one", "two"):
                with hosted(tmp_path / name) as controller:
                    where.address = await asyncio.to_thread(controller.address)
                    await joined(worker, tmp_path / name)
                    where.address = ""
                    await asyncio.to_thread(controller.stop)
            assert worker.control.table.source in ("controller", "last table")
        finally:
            await worker.stop()
        assert not (await asyncio.wait([watching], timeout=0.5))[0], "its engine has ended, as it was asked to"
        watching.cancel()
        assert not end_of_process

    asyncio.run(scenario())


async def joined(worker: ServedWorker, folder: Path) -> None:
    """Wait until the worker reports to the controller of the database in this folder."""
    async with asyncio.timeout(PATIENCE_S):
        while (
            not worker.control.connected
            or worker.control.controller is None
            or worker.control.controller.database != str((folder / "speclen.db").resolve())
        ):
            await asyncio.sleep(0.05)
