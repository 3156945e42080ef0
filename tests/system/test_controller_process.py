"""A controller whose database is deleted ends with one line, and acknowledges nothing more."""

import contextlib

import grpc

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
