"""A controller as its operator meets it: one line when it serves, one sentence when it cannot, nothing lost either way."""

import contextlib
import signal
import socket
import subprocess
import sys

import grpc

from speclen.store.connection import connect_reader
from speclen.store.queries import stored_reports, workers
from speclen.v1 import control_pb2_grpc as rpc
from tests.support.control_fakes import group
from tests.support.controller_process import address_of, report_some, start

PATIENCE_S = 90  # a start takes half a second of processor time; the machine may be busy


@contextlib.contextmanager
def killed_at_the_end(process):
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def refused(*options: str) -> str:
    """The one sentence with which the controller does not start."""
    process = start(*options)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (2, ""), errors
    [line] = errors.strip().splitlines()
    assert line.startswith("speclen: ")
    return line


def test_serves_saves_and_stops_when_told(tmp_path):
    process = start("--data-dir", str(tmp_path / "new"))
    report_some(address_of(process), 20)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    with connect_reader(tmp_path / "new" / "speclen.db") as database:
        assert [row.seq for row in stored_reports(database)] == list(range(1, 21))
        assert workers(database)[0].applied_seq == 20


def test_is_light_enough_to_start_in_a_moment():
    """An operator restarts one under load."""
    code = "import sys, speclen.cli.controller, speclen.controller.service.server; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "transformers", "matplotlib", "sqlite_utils", "prometheus_client"} & set(loaded)


def test_a_taken_port_is_not_shared():
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert "--listen" in refused("--in-memory", "--listen", address)
        assert "--metrics-listen" in refused("--in-memory", "--metrics-listen", address)


def test_a_deleted_database_ends_the_controller_and_acknowledges_nothing_more(tmp_path):
    database = tmp_path / "gone.db"
    with killed_at_the_end(start("--db", str(database))) as process:
        address = address_of(process)
        report_some(address, 20)
        database.unlink()
        last = 20
        with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
            stub = rpc.ControlServiceStub(channel)
            for answer in stub.StreamReports(iter([group(21, 40)]), timeout=30):
                last = max(last, answer.durable_seq)
        assert last == 20
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        [told] = [line for line in errors.splitlines() if "critical" in line]
        assert "deleted" in told
