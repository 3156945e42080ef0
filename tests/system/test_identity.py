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
from speclen.v1 import control_pb2_grpc as rpc
from tests.support.addresses import free_address, two_free_ports
from tests.support.control_fakes import registration, running_controller
from tests.support.waiting import PATIENCE_S


def refusal_of_up(*arguments: str, cwd: Path) -> str:
    """The one sentence of a `speclen up` that was refused."""
    command = [sys.executable, "-m", "speclen.cli.app", "up", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=PATIENCE_S)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert "worker 0" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("one") / "speclen.db"


@pytest.fixture(scope="module")
def running(database):
    """A controller of the run "one"."""
    with running_controller(database.parent, run_id="one") as child:
        yield child


def test_a_controller_states_its_run_and_database(running, database, tmp_path):
    with Client().channel(running.address) as channel:
        found = identity(channel, "controller")
    assert (found.run_id, found.database) == ("one", str(database))
    assert found.process_id == running.process.pid
    (tmp_path / "other-name.db").hardlink_to(database)
    assert owns(found, tmp_path / "other-name.db")
    assert not owns(found, tmp_path / "absent.db")


def test_a_second_up_names_the_running_one_and_starts_nothing(running, database, tmp_path):
    """Story: it printed "the controller is serving", and restarted its own without end."""
    said = refusal_of_up("--controller", running.address, "--listen", free_address(), cwd=tmp_path)
    assert "a speclen controller of" in said
    assert str(database) in said
    assert not (tmp_path / ".speclen").exists()


def test_up_on_a_port_of_another_program_says_so(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refusal_of_up("--controller", free_address(), "--listen", address, cwd=tmp_path)
        assert f"{address} is taken by another program" in said


def test_up_on_a_database_in_use_says_so_before_a_worker_starts(running, database, tmp_path):
    (tmp_path / ".speclen").symlink_to(database.parent)
    said = refusal_of_up("--controller", free_address(), "--listen", free_address(), cwd=tmp_path)
    assert "in use by another controller" in said


def test_a_controller_refuses_a_worker_of_another_run(running):
    with grpc.insecure_channel(running.address) as channel:
        stub = rpc.ControlServiceStub(channel)
        request = registration(run_id="two")
        with pytest.raises(grpc.RpcError) as error:
            stub.RegisterWorker(request, timeout=PATIENCE_S)
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "'two'" in error.value.details()
        request.run_id = "one"
        assert stub.RegisterWorker(request, timeout=PATIENCE_S).controller.run_id == "one"
        request.run_id = ""  # an older worker, or one that was started by hand
        assert stub.RegisterWorker(request, timeout=PATIENCE_S).controller.run_id == "one"


def test_another_server_on_a_childs_port_is_not_mistaken_for_it(running, tmp_path):
    ours = Child("controller", ["controller"], running.address, tmp_path / "log", run_id="two")
    with pytest.raises(UserError, match="is taken by a speclen controller of"):
        ours.is_serving()


def test_a_profile_for_one_database_does_not_go_into_another(running, database, tmp_path):
    """Story: `profile import --db B.db` wrote into the controller of A.db, and said that it owned B.db."""
    other = tmp_path / "b" / "speclen.db"
    with running_controller(other.parent):
        with pytest.raises(UserError, match=rf"keeps {database}, not .*b/speclen.db"):
            find_destination(other, running.address, Client())
        for address in ("", running.address):
            found = find_destination(database, address, Client())
            assert (found.address, found.db) == (running.address, database)
    assert find_destination(other, "", Client()).address == "", "its controller has ended"


def test_every_worker_has_an_http_front_one_port_further(tmp_path):
    from speclen.cli.up import Places, children_of

    host, port = "127.0.0.1", two_free_ports()
    places = Places.choose("127.0.0.1:0", "127.0.0.1:0", 2, Client(), any_port=False, http_listen=f"{host}:{port}")
    assert places.fronts == [f"{host}:{port}", f"{host}:{port + 1}"]
    commands = [child.arguments for child in children_of(places, tmp_path, Client(), [])[1:]]
    assert [command[command.index("--http-listen") + 1] for command in commands] == places.fronts
    with socket.create_server((host, port + 1)), pytest.raises(UserError, match="another with --http-listen"):
        Places.choose("127.0.0.1:0", "127.0.0.1:0", 2, Client(), any_port=False, http_listen=f"{host}:{port}")
