"""Child processes end with their parent, even if it was killed and could not signal them."""

import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from speclen.process.supervision import start_tied
from speclen.store.database import Store
from tests.support.addresses import free_address
from tests.support.waiting import PATIENCE_S, is_alive, until

PARENT = """
import os, signal, sys
from speclen.process.supervision import start_tied

process = start_tied([sys.executable, "-c", sys.argv[1]])
print(process.pid, flush=True)
if sys.argv[2] == "at once":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""
READY = "from speclen.process.supervision import end_with_parent; import signal, time; "


@pytest.mark.parametrize(
    ("child", "when"),
    [
        (READY + "end_with_parent(); time.sleep(100)", "later"),
        (READY + "time.sleep(0.5); end_with_parent(); time.sleep(100)", "at once"),  # before it looks
        (READY + "end_with_parent(); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)", "later"),
    ],
)
def test_a_child_ends_when_its_parent_is_killed(child, when):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, child, when], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pid = int(parent.stdout.readline())
    if when == "later":
        assert is_alive(pid)
        parent.kill()
    parent.wait(PATIENCE_S)
    until(lambda: not is_alive(pid))


def test_a_child_of_a_living_process_continues_and_passes_no_lifeline_on():
    names = "print(*[name for name in os.environ if 'LIFELINE' in name], sep='')"
    child = start_tied([sys.executable, "-c", f"import os; {READY} end_with_parent(); {names}"], stdout=subprocess.PIPE)
    assert child.communicate(timeout=PATIENCE_S)[0] == b"\n"
    assert child.returncode == 0


def test_a_killed_up_leaves_no_process_port_or_lock(folders, tmp_path):
    controller, worker = free_address(), free_address()
    target, draft = folders
    command = [sys.executable, "-m", "speclen.cli.app", "up", "--target", target, "--draft", draft, "--http-listen", ""]
    command += ["--controller", controller, "--listen", worker, "--data-dir", str(tmp_path), "--device", "cpu"]
    with (tmp_path / "up.log").open("wb") as log:
        up = start_tied(command, stdout=log, stderr=log)
    for address in (controller, worker):
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(PATIENCE_S)
    children = [int(each) for each in Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()]
    assert len(children) == 2
    up.kill()
    up.wait()
    until(lambda: not any(map(is_alive, children)))
    for address in (controller, worker):
        host, port = address.split(":")
        with socket.create_server((host, int(port))):
            pass
    Store.open(tmp_path / "speclen.db").close()
