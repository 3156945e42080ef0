"""A controller as its operator meets it: one line when it serves, one sentence when it cannot, nothing lost either way."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import httpx
import pytest

from speclen.store.connection import connect_reader, connect_writer
from speclen.store.database import Store
from speclen.store.queries import stored_reports, workers
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from tests.support.control_fakes import group, identity, registration

PATIENCE_S = 90  # a start takes half a second of processor time; the machine may be busy


def start(*options: str, **more) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "speclen.cli.app", "controller", "--listen", "127.0.0.1:0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def address_of(process: subprocess.Popen) -> str:
    line = process.stdout.readline()
    assert line.startswith("speclen controller serving on 127.0.0.1:"), process.stderr.read()
    return line.split("serving on ")[1].split(",")[0]


def refused(*options: str, **more) -> str:
    """The one sentence with which the controller does not start."""
    process = start(*options, **more)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2, errors
    assert output == ""
    lines = errors.strip().splitlines()
    assert len(lines) == 1, errors
    assert lines[0].startswith("speclen: ")
    return lines[0]


def report_some(address: str, last_seq: int) -> None:
    """Reports 1..last_seq, durable."""
    with grpc.insecure_channel(address) as channel:
        stub = rpc.ControlServiceStub(channel)
        stub.RegisterWorker(registration(), timeout=30)
        for answer in stub.StreamReports(iter([group(1, last_seq)]), timeout=30):
            if answer.durable_seq == last_seq:
                return
    raise AssertionError("never durable")


def test_serves_saves_and_stops_when_told(tmp_path):
    process = start("--data-dir", str(tmp_path / "new"), "--metrics-listen", "127.0.0.1:0")
    line = process.stdout.readline()
    address = line.split("serving on ")[1].split(",")[0]
    assert "metrics http://127.0.0.1:" in line
    report_some(address, 20)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    with connect_reader(tmp_path / "new" / "speclen.db") as database:
        assert [row.seq for row in stored_reports(database)] == list(range(1, 21))
        assert workers(database)[0].applied_seq == 20


def test_is_light_enough_to_start_in_a_moment():
    """The kill test starts hundreds of controllers, and an operator restarts one under load."""
    code = "import sys, speclen.cli.controller, speclen.controller.service.server; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    heavy = {"torch", "transformers", "matplotlib", "sqlite_utils", "prometheus_client", "pydantic"}
    assert not heavy & set(loaded)


def test_a_taken_port_is_not_shared():
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert "--listen" in refused("--in-memory", "--listen", f"127.0.0.1:{port}")
        assert "--metrics-listen" in refused("--in-memory", "--metrics-listen", f"127.0.0.1:{port}")


def test_two_controllers_do_not_share_a_database(tmp_path):
    process = start("--db", str(tmp_path / "one.db"))
    address_of(process)
    try:
        assert f"process {process.pid}" in refused("--db", str(tmp_path / "one.db"))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind", ["symlink", "hard link"])
def test_two_controllers_do_not_share_a_database_under_two_names(tmp_path, kind):
    first, second = tmp_path / "one.db", tmp_path / "two.db"
    process = start("--db", str(first))
    address = address_of(process)
    try:
        os.symlink(first, second) if kind == "symlink" else os.link(first, second)
        assert "is in use by another controller" in refused("--db", str(second))
        report_some(address, 20)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_deleted_database_ends_the_controller_and_acknowledges_nothing_more(tmp_path, replaced):
    database = tmp_path / "gone.db"
    process = start("--db", str(database))
    address = address_of(process)
    try:
        report_some(address, 20)
        database.unlink()
        if replaced:
            database.write_bytes(b"")
        last = 20
        with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
            stub = rpc.ControlServiceStub(channel)
            for answer in stub.StreamReports(iter([group(21, 40)]), timeout=30):
                last = max(last, answer.durable_seq)
        assert last == 20
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        told = [line for line in errors.splitlines() if "critical" in line]
        assert len(told) == 1
        assert ("replaced" if replaced else "deleted") in told[0]
    finally:
        process.kill()


def test_a_database_that_cannot_be_written_is_refused(tmp_path):
    folder = tmp_path / "file"
    folder.write_text("")
    assert "--db" in refused("--db", str(folder / "x.db"))
    (tmp_path / "noise.db").write_bytes(os.urandom(8192))
    assert "--move-corrupt-aside" in refused("--db", str(tmp_path / "noise.db"))
    process = start("--db", str(tmp_path / "noise.db"), "--move-corrupt-aside")
    address_of(process)
    process.terminate()
    process.communicate(timeout=PATIENCE_S)
    assert len(list(tmp_path.glob("noise.db.damaged-*"))) >= 1


def test_a_database_of_another_form_is_refused(tmp_path):
    path = tmp_path / "other.db"
    Store.open(path).close()
    connection = connect_writer(path)
    connection.execute("PRAGMA application_id = 7")
    connection.close()
    assert "other.db" in refused("--db", str(path))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--policy", "guess"], "guess"),
        (["--listen", "0.0.0.0:0"], "--insecure"),
        (["--listen", "nowhere"], "HOST:PORT"),
        (["--token-file", "/does/not/exist"], "--token-file"),
    ],
)
def test_bad_settings_are_one_sentence(options, named):
    assert named in refused("--in-memory", *options)


def test_a_stopped_controller_loses_nothing_and_a_killed_one_nothing_durable(tmp_path):
    database = str(tmp_path / "k.db")
    process = start("--db", database)
    report_some(address_of(process), 50)
    process.kill()
    process.communicate()
    process = start("--db", database)
    address = address_of(process)
    try:
        with grpc.insecure_channel(address) as channel:
            stub = rpc.ControlServiceStub(channel)
            assert stub.RegisterWorker(registration(), timeout=30).durable_seq == 50
            rows = stub.GetLearnedTable(pb.GetLearnedTableRequest(), timeout=5).tables[0].rows
            assert sum(row.num_steps for row in rows) == 50
    finally:
        process.kill()
        process.communicate()


def test_a_stopped_worker_is_noticed(tmp_path):
    """SIGSTOP: its connection stays open and its kernel answers, but no heartbeat comes."""
    process = start("--in-memory", "--silence-s", "1", "--metrics-listen", "127.0.0.1:0")
    line = process.stdout.readline()
    address, page = line.split("serving on ")[1].split(",")[0], line.split("metrics ")[1].strip()
    code = (
        "import sys, time, grpc; sys.path.insert(0, sys.argv[2])\n"
        "from tests.support.control_fakes import group, registration, pb, rpc, identity\n"
        "stub = rpc.ControlServiceStub(grpc.insecure_channel(sys.argv[1]))\n"
        "stub.RegisterWorker(registration(), timeout=30)\n"
        "def beats():\n"
        "    yield group(1, 3)\n"
        "    while True:\n"
        "        time.sleep(0.1); yield pb.StreamReportsRequest()\n"
        "for answer in stub.StreamReports(beats()): print(answer.applied_seq, flush=True)\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", code, address, str(Path(__file__).parents[2])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        for _ in range(20):
            assert worker.stdout.readline().strip() == b"3", "alive for two seconds with heartbeats alone"
        worker.send_signal(signal.SIGSTOP)
        with grpc.insecure_channel(address) as channel:
            # Waited for, since time in which the machine stands still is nobody's silence.
            stub, deadline = rpc.ControlServiceStub(channel), time.monotonic() + PATIENCE_S
            while "speclen_controller_streams 0.0" not in httpx.get(page, timeout=PATIENCE_S).text:
                assert time.monotonic() < deadline, "it is not noticed"
                time.sleep(0.1)
            worker.send_signal(signal.SIGCONT)
            worker.wait(PATIENCE_S)
            assert b"DEADLINE_EXCEEDED" in worker.stderr.read()
            assert stub.GetLearnedTable(pb.GetLearnedTableRequest(), timeout=5).tables
            assert identity().worker_id == "w"
    finally:
        worker.kill()
        worker.communicate()
        process.kill()
        process.communicate()
