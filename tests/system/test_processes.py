"""A child process that dies is restarted after a growing pause, and its last log line is printed."""

import signal
import subprocess
import sys
import time

import pytest

from speclen.cli.app import settings_of_verb
from speclen.cli.support import processes
from speclen.cli.support.flags import check_environment
from speclen.cli.support.output import UserError
from speclen.cli.support.processes import Child, stop_all
from tests.support.waiting import PATIENCE_S, is_alive, until

DYING = ["generate", "x", "--speculation", "many"]  # ends at once with exit code 2 and one sentence


def child(tmp_path, arguments=DYING) -> Child:
    return Child("worker 0", list(arguments), "127.0.0.1:1", tmp_path / "log")


def died(one: Child) -> Child:
    one.start()
    one.process.wait(PATIENCE_S)
    return one


def test_the_cause_of_a_failed_start_is_reported(tmp_path):
    with pytest.raises(UserError, match="worker 0 did not start: --speculation 'many' is unknown"):
        died(child(tmp_path)).wait_until_serving(5)


def test_a_child_that_never_serves_is_an_error_that_names_its_log(tmp_path, monkeypatch):
    running = child(tmp_path, ["generate", "-", "--worker", "127.0.0.1:1"])
    # Not started: neither dead nor serving.
    monkeypatch.setattr(processes, "NEWS_S", 0.1)
    said: list[str] = []
    with pytest.raises(UserError, match="log"):
        running.wait_until_serving(0.5, said.append)
    assert said[0] == "worker 0: starting (0 s so far)"


def test_advice_of_a_child_names_variables_instead_of_flags(tmp_path):
    """`speclen up` repeated the controller's advice to use a flag, which `up` does not have."""
    (tmp_path / "noise.db").write_bytes(b"noise " * 1000)
    arguments = ["controller", "--db", str(tmp_path / "noise.db")]
    one = Child("controller", arguments, "127.0.0.1:1", tmp_path / "log")
    with pytest.raises(UserError, match="is damaged") as refused:
        died(one).wait_until_serving(30)
    assert "with SPECLEN_CONTROLLER_MOVE_CORRUPT_ASIDE=1 in the environment" in str(refused.value)
    assert "--move-corrupt-aside" not in str(refused.value)
    assert "SPECLEN_CONTROLLER_MOVE_CORRUPT_ASIDE=1" in (one.restart_if_dead(one.started_at) or "")
    check_environment(["SPECLEN_CONTROLLER_MOVE_CORRUPT_ASIDE"], ["controller"], settings_of_verb)


def test_a_child_killed_while_starting_is_reported_with_its_signal(tmp_path):
    """Its last log line, or that of another run, was reported instead of the signal."""
    one = child(tmp_path, ["generate", "-", "--worker", "127.0.0.1:1"])
    one.log_file.write_text("of an earlier life\n")
    one.start()
    one.process.send_signal(signal.SIGKILL)
    one.process.wait(PATIENCE_S)
    with pytest.raises(UserError, match="worker 0 did not start: it was sent a signal: Killed"):
        one.wait_until_serving(5)
    assert "earlier" not in one.last_line()


def test_a_restart_that_fails_is_tried_again_later(tmp_path, monkeypatch):
    """The whole fleet was stopped because of it. A deleted log file is not a reason to stop, either."""
    one = died(child(tmp_path))
    one.log_file.unlink()
    now = one.started_at
    assert "it printed nothing" in (one.restart_if_dead(now) or "")

    def fails(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr("subprocess.Popen", fails)
        assert "Resource temporarily unavailable" in (one.restart_if_dead(now + 1) or "")
    assert one.restart_if_dead(now + 1.5) is None
    assert "started again" in (one.restart_if_dead(now + 3.1) or "")
    died_again = one.process
    died_again.wait(PATIENCE_S)


# Says when it was told to end. A worker then takes until both were told, and notes how many had ended before.
PEER = """
import signal, sys, time
from pathlib import Path

def end(*_):
    Path(f"told {sys.argv[1]}").touch()
    while sys.argv[1] != "controller" and len([*Path().glob("told worker*")]) < 2:
        time.sleep(0.01)
    Path(f"ended {sys.argv[1]}").write_text(str(len([*Path().glob("ended *")])))
    sys.exit()

signal.signal(signal.SIGTERM, end)
print(flush=True)
time.sleep(120)
"""


class Peer(Child):
    """A child that runs that instead of a verb."""

    def start(self) -> None:
        command = [sys.executable, "-c", PEER, self.name]
        self.process = subprocess.Popen(command, cwd=self.log_file.parent, stdout=subprocess.PIPE)
        self.process.stdout.readline()


def test_workers_stop_together_and_the_controller_after_them(tmp_path):
    """Workers were stopped one after the other, so that stopping eight took the sum of their drains."""
    names = ("controller", "worker 0", "worker 1")
    children = [Peer(name, [name.split()[0]], "", tmp_path / "log") for name in names]
    for one in children:
        one.start()
    stop_all(children, 20.0)
    assert [one.exit_code for one in children] == [0, 0, 0]
    assert (tmp_path / "ended controller").read_text() == "2"


@pytest.mark.parametrize(("takes_settings", "words"), [(True, "SPECLEN_GENERATE_TPO_K"), (False, "'many' is unknown")])
def test_a_benchmarks_child_reads_no_settings(tmp_path, monkeypatch, takes_settings, words):
    """With a token in the environment a benchmark's own worker would refuse the benchmark."""
    monkeypatch.setenv("SPECLEN_GENERATE_TPO_K", "3")
    one = child(tmp_path)
    one.takes_settings = takes_settings
    assert words in died(one).last_line()


PARENT = """
import signal, subprocess, sys, time
from pathlib import Path
from speclen.cli.support.processes import Child, end_as_by_ctrl_c, stop_all

STUBBORN = "; ".join([
    "import signal, time",
    "signal.signal(signal.SIGTERM, lambda *a: open('told', 'w'))",
    "print(flush=True)",
    "time.sleep(120)",
])

class Stubborn(Child):
    def start(self):
        command = [sys.executable, "-c", STUBBORN]
        self.process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
        self.process.stdout.readline()

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup, or in the background
signal.signal(signal.SIGINT, signal.default_int_handler)
end_as_by_ctrl_c()
children = [Stubborn(kind, [kind], "", Path("log")) for kind in ("controller", "worker")]
for child in children:
    child.start()
try:
    print(*(child.process.pid for child in children), flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("stopping", flush=True)
finally:
    stop_all(children, 100.0)
"""


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_interrupting_the_shutdown_leaves_no_process(tmp_path, first):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    children = [int(each) for each in parent.stdout.readline().split()]
    assert len(children) == 2
    parent.send_signal(first)
    assert parent.stdout.readline() == "stopping\n", "closing the terminal is like Ctrl-C"
    if first == signal.SIGHUP:
        parent.send_signal(first)  # it is sent twice, which is not a second Ctrl-C
        time.sleep(0.5)
        assert all(is_alive(pid) for pid in children)
    until((tmp_path / "told").exists)  # else the interrupt may come before the end has begun
    parent.send_signal(signal.SIGINT)
    parent.wait(PATIENCE_S)
    assert not any(is_alive(pid) for pid in children)
