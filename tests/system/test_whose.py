"""A server is never mistaken for another: it states its run and database, and clients compare them."""

import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from speclen.cli.profile_import import find_destination
from speclen.cli.support.client import Client, identity, owns
from speclen.cli.support.output import UserError
from speclen.cli.support.processes import Child
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from tests.support.addresses import free_address, two_free_ports
from tests.support.control_fakes import running_controller
from tests.support.waiting import PATIENCE_S


def speclen(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "speclen.cli.app", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        timeout=PATIENCE_S,
    )


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The one sentence of a command that was refused."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


def test_a_controller_states_its_run_and_database(tmp_path):
    with running_controller(tmp_path / "a", run_id="one") as running, Client().channel(running.address) as channel:
        found = identity(channel, "controller")
        assert (found.run_id, found.database) == ("one", str(tmp_path / "a" / "speclen.db"))
        assert found.process_id == running.process.pid
        (tmp_path / "other-name.db").hardlink_to(tmp_path / "a" / "speclen.db")
        assert owns(found, tmp_path / "other-name.db")
        assert not owns(found, tmp_path / "absent.db")


def test_a_second_up_names_the_running_one_and_starts_nothing(tmp_path):
    """It used to print "the controller is serving" and to restart its own without end."""
    with running_controller(tmp_path / "a") as running:
        said = refused(speclen("up", "--controller", running.address, "--listen", free_address(), cwd=tmp_path))
        assert "a speclen controller of" in said
        assert str(tmp_path / "a" / "speclen.db") in said
        assert not (tmp_path / ".speclen").exists()


def test_up_on_a_port_of_another_program_says_so(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refused(speclen("up", "--controller", free_address(), "--listen", address, cwd=tmp_path))
        assert f"{address} is taken by another program" in said


def test_up_on_a_database_in_use_says_so_before_a_worker_starts(tmp_path):
    with running_controller(tmp_path / ".speclen"):
        result = speclen("up", "--controller", free_address(), "--listen", free_address(), cwd=tmp_path)
        assert "in use by another controller" in refused(result)
        assert "worker 0" not in result.stderr


def test_a_controller_refuses_a_worker_of_another_run(tmp_path):
    with running_controller(tmp_path / "a", run_id="one") as running, grpc.insecure_channel(running.address) as channel:
        stub = rpc.ControlServiceStub(channel)
        request = pb.RegisterWorkerRequest(
            worker=pb.WorkerIdentity(worker_id="w", epoch=1),
            context=pb.ContextKey(target="t", draft="d", device="cpu", dtype="float32", engine_fingerprint="e"),
            limits=pb.WorkerLimits(max_batch_size=4, max_speculation_length=2),
            run_id="two",
        )
        with pytest.raises(grpc.RpcError) as error:
            stub.RegisterWorker(request, timeout=PATIENCE_S)
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "'two'" in error.value.details()
        request.run_id = "one"
        assert stub.RegisterWorker(request, timeout=PATIENCE_S).controller.run_id == "one"
        request.run_id = ""  # an older worker, or one that was started by hand
        assert stub.RegisterWorker(request, timeout=PATIENCE_S).controller.run_id == "one"


def test_another_server_on_a_childs_port_is_not_mistaken_for_it(tmp_path):
    with running_controller(tmp_path / "a", run_id="one") as running:
        ours = Child("controller", ["controller"], running.address, tmp_path / "log", run_id="two")
        with pytest.raises(UserError, match="is taken by a speclen controller of"):
            ours.is_serving()


def test_a_profile_for_one_database_does_not_go_into_another(tmp_path):
    """`profile import --db B.db` wrote into the controller of A.db, and said that it owned B.db."""
    with running_controller(tmp_path / "a") as a, running_controller(tmp_path / "b"):
        with pytest.raises(UserError, match=r"keeps .*a/speclen.db, not .*b/speclen.db"):
            find_destination(tmp_path / "b" / "speclen.db", a.address, Client())
        assert find_destination(tmp_path / "a" / "speclen.db", "", Client()).address == a.address
        found = find_destination(tmp_path / "a" / "speclen.db", a.address, Client())
        assert (found.address, found.db) == (a.address, tmp_path / "a" / "speclen.db")
    assert find_destination(tmp_path / "b" / "speclen.db", "", Client()).address == ""  # nobody keeps it any more


def test_every_worker_has_an_http_front_one_port_further(tmp_path):
    from speclen.cli.up import Places, children_of

    host, port = "127.0.0.1", two_free_ports()
    places = Places.choose("127.0.0.1:0", "127.0.0.1:0", 2, Client(), any_port=False, http_listen=f"{host}:{port}")
    assert places.fronts == [f"{host}:{port}", f"{host}:{port + 1}"]
    commands = [child.arguments for child in children_of(places, tmp_path, Client(), [])[1:]]
    assert [command[command.index("--http-listen") + 1] for command in commands] == places.fronts
    with socket.create_server((host, port + 1)), pytest.raises(UserError, match="another with --http-listen"):
        Places.choose("127.0.0.1:0", "127.0.0.1:0", 2, Client(), any_port=False, http_listen=f"{host}:{port}")
