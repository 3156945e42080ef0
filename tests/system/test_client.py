"""One configuration is used for every server, with TLS and a token; clients that ping stay connected."""

import contextlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from speclen.cli.app import with_client_defaults
from speclen.cli.profile_import import find_destination
from speclen.cli.support.client import Client, check_controller, identity
from speclen.cli.support.output import UserError
from speclen.controller.service import controller_server as controller
from speclen.process import servers
from speclen.process.credentials import ClientSecurity, ServerSecurity
from speclen.worker.frontend import worker_server as worker
from tests.support.addresses import free_address
from tests.support.certificates import make_certificates
from tests.support.control_fakes import running_controller
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def token(tmp_path_factory):
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text("0123456789abcdef\n")
    return path


@pytest.fixture(scope="module")
def guarded(made, token, tmp_path_factory):
    """A controller with TLS and a token; `Child` waits for it with the same client as every verb."""
    options = ["--tls-cert", str(made.server.cert), "--tls-key", str(made.server.key), "--token-file", str(token)]
    client = Client(ClientSecurity(ca=made.authority.cert, token_file=token))
    folder = tmp_path_factory.mktemp("guarded")
    with running_controller(folder, *options, "--probe-listen", free_address(), run_id="mine", client=client) as child:
        yield child


@pytest.mark.parametrize("name", ["no_such_proxy", "http_proxy", "https_proxy", "grpc_proxy"])
def test_a_client_with_authority_and_token_connects_directly_to_this_machine(guarded, made, token, monkeypatch, name):
    """gRPC sends every call through a proxy, even one to this machine."""
    for each in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    client = Client(ClientSecurity(ca=made.authority.cert, token_file=token))
    with client.channel(guarded.address) as channel:
        assert identity(channel, "controller").run_id == "mine"


@pytest.mark.parametrize(
    ("ca", "given", "words"),
    [
        ("authority", None, "requires a token: name the file that holds it with --token-file"),
        ("authority", "wrong", "rejects the token in"),
        ("stranger", "right", "does not verify the controller at"),
        (None, "right", "uses TLS, give --ca"),
    ],
)
def test_a_refused_client_is_given_the_reason(guarded, made, token, tmp_path, ca, given, words):
    (tmp_path / "wrong").write_text("fedcba9876543210")
    token_file = {None: None, "right": token, "wrong": tmp_path / "wrong"}[given]
    client = Client(ClientSecurity(ca=None if ca is None else getattr(made, ca).cert, token_file=token_file))
    with pytest.raises(UserError, match=words):
        find_destination(Path(".speclen/speclen.db"), guarded.address, client)


def test_a_worker_with_a_wrong_token_does_not_start(guarded, made, tmp_path):
    """Story: it logged one warning, reported SERVING and never learned."""
    (tmp_path / "wrong").write_text("fedcba9876543210")
    security = ClientSecurity(ca=made.authority.cert, token_file=tmp_path / "wrong", prefix="--controller-")
    with pytest.raises(UserError, match="rejects the token in"):
        check_controller(security, guarded.address, "")
    with pytest.raises(UserError, match="name the file that holds it with --controller-token-file"):
        check_controller(ClientSecurity(ca=made.authority.cert, prefix="--controller-"), guarded.address, "")
    check_controller(ClientSecurity(), free_address(), "")  # none yet: it may come


def test_invalid_pem_is_refused_before_grpc_reads_it(made, tmp_path, capfd):
    junk = tmp_path / "junk.pem"
    junk.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    (tmp_path / "empty").write_text("")
    for path in (junk, tmp_path / "empty", made.server.key):
        with pytest.raises(UserError, match=r"--ca .* holds no certificates in PEM"):
            Client(ClientSecurity(ca=path))
    for cert, key, words in (
        (made.server.key, made.server.key, "holds no certificate in PEM: was it swapped"),
        (made.server.cert, made.server.cert, "holds no key in PEM: was it swapped"),
        (made.server.cert, made.client.key, "do not belong together"),
        (junk, made.server.key, "cannot be used"),
    ):
        with pytest.raises(ValueError, match=words):
            ServerSecurity(cert, key).credentials()
    assert "ssl" not in capfd.readouterr().err.lower()  # gRPC prints pages about what it cannot read


def test_client_variables_override_the_file(monkeypatch):
    monkeypatch.setenv("SPECLEN_CLIENT_WORKER", "a:1, b:2")
    monkeypatch.delenv("SPECLEN_CLIENT_CA", raising=False)
    defaults = with_client_defaults({"client": {"worker": "c:3", "ca": "x.pem"}, "generate": {"ca": "y.pem"}})
    assert defaults["generate"] == {"worker": "a:1, b:2", "ca": "y.pem"}
    assert defaults["top"]["worker"] == ["a:1", "b:2"]  # alone in taking several
    assert defaults["profile"]["import"] == {"ca": "x.pem"}
    assert defaults["up"] == {"ca": "x.pem"}  # where it listens is not where clients look


def test_a_verbs_own_section_overrides_the_client_variables(monkeypatch):
    """Story: this held for `profile` alone."""
    monkeypatch.setenv("SPECLEN_CLIENT_WORKER", "all:1")
    monkeypatch.setenv("SPECLEN_CLIENT_CA", "all.pem")
    own = {"generate": {"worker": "own:1"}, "up": {"ca": "own.pem"}, "profile": {"run": {"ca": "own.pem"}}}
    defaults = with_client_defaults({"client": {"ca": "file.pem"}, **own})
    assert defaults["generate"] == {"worker": "own:1", "ca": "all.pem"}
    assert defaults["up"] == {"ca": "own.pem"}
    assert defaults["profile"] == {"run": {"ca": "own.pem"}, "import": {"ca": "all.pem"}}


def test_the_health_probe_of_a_container_works(guarded):
    probe = [sys.executable, "-m", "speclen.cli.health", "controller"]
    listening = guarded.arguments[guarded.arguments.index("--probe-listen") + 1]
    assert subprocess.run([*probe, listening], check=False).returncode == 0
    refused = subprocess.run([*probe, guarded.address], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "uses TLS, give --ca" in refused.stderr


PINGS_OFTEN = [
    ("grpc.keepalive_time_ms", 1000),  # gRPC pings no more often
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
OF_ITS_OWN = ("grpc.use_local_subchannel_pool", 1)  # a connection


def test_pings_close_neither_a_silent_call_nor_an_idle_channel():
    """By default the third ping, after three seconds, ends a connection."""
    with contextlib.ExitStack() as ending:
        servicer, watches, states = health.HealthServicer(), [], []
        for options in (servers.SERVER_OPTIONS, worker.OPTIONS, controller.OPTIONS):
            server = grpc.server(ThreadPoolExecutor(2), options=options)
            health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
            address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            server.start()
            ending.callback(server.stop, None)
            silent = ending.enter_context(grpc.insecure_channel(address, PINGS_OFTEN))
            idle = ending.enter_context(grpc.insecure_channel(address, [*PINGS_OFTEN, OF_ITS_OWN]))
            grpc.channel_ready_future(idle).result(PATIENCE_S)
            idle.subscribe(states.append)
            watches.append(health_pb2_grpc.HealthStub(silent).Watch(health_pb2.HealthCheckRequest()))
            next(watches[-1])
        time.sleep(3.3)
        servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert [next(watch).status for watch in watches] == [health_pb2.HealthCheckResponse.NOT_SERVING] * 3
        assert states == [grpc.ChannelConnectivity.READY] * 3, "none was cut off"
