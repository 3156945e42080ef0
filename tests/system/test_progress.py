"""A start is waited for as long as it gets on: `up` used to kill a worker that was still downloading its model."""

import os
import subprocess
import sys
import time

import pytest

from speclen.cli.support import progress
from speclen.cli.support.errors import UserError
from speclen.cli.support.processes import Child
from speclen.cli.support.progress import LiveLine, Progress, Work, work_of


def test_work_of_this_process_grows():
    before = work_of(os.getpid())
    deadline = time.process_time() + 0.2
    while time.process_time() < deadline:
        pass
    after = work_of(os.getpid())
    assert before is not None
    assert after is not None
    assert after.cpu_s > before.cpu_s
    assert work_of(2**30) is None


def test_what_moves_has_not_stalled(monkeypatch):
    """A download: no processor time to speak of, bytes every now and then, for an hour; then nothing."""
    moved = {"bytes": 0}
    monkeypatch.setattr(progress, "work_of", lambda pid: Work(1.0, moved["bytes"]))
    following = Progress(1, 0.0)
    for now in range(0, 3600, 60):
        moved["bytes"] += 2 << 20
        assert not following.stalled(float(now), 180.0)
    assert not following.stalled(3540.0 + 179.0, 180.0)
    assert following.stalled(3540.0 + 180.0, 180.0)


def test_a_process_that_cannot_be_looked_into_is_believed_to_work(monkeypatch):
    monkeypatch.setattr(progress, "work_of", lambda pid: None)
    following = Progress(1, 0.0)
    assert not any(following.stalled(float(now), 180.0) for now in range(0, 3600, 60))


def test_one_hears_what_is_waited_for():
    following = Progress(os.getpid(), 0.0)
    following.note("loading meta-llama/Llama-3.1-8B and no draft")
    following.stalled(0.0, 180.0)
    assert following.news(progress.NEWS_S - 1) == ""
    assert following.news(progress.NEWS_S).startswith("still at: loading meta-llama/Llama-3.1-8B and no draft (20 s, ")
    assert following.news(progress.NEWS_S + 1) == ""


def test_a_slow_start_outlives_the_patience_for_standing_still(tmp_path, monkeypatch):
    """It computes for 3 s, twice the patience, and then ends with a word of its own."""
    monkeypatch.setattr(progress, "WORK_CPU_S", 0.03)  # what a process gets in that time on a machine full of others
    code = "import time\nend = time.process_time() + 3\nwhile time.process_time() < end: pass\nprint('done'); exit(2)"
    child = Child("worker 0", ["worker"], "127.0.0.1:1", tmp_path / "log")
    with child.log_file.open("w") as log:
        child.process = subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=log)
    with pytest.raises(UserError, match=r"^the worker 0 did not start: done$"):
        child.wait_until_serving(1.5)


def test_where_there_is_no_terminal_each_text_is_a_line_once(capsys):
    with LiveLine() as line:
        for seconds in range(3):
            line.show("load 1 of 5", f", {seconds} s")
        line.show("load 2 of 5")
    assert capsys.readouterr().err == "load 1 of 5\nload 2 of 5\n"


def test_in_a_terminal_the_line_is_cut_to_its_width(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    with LiveLine() as line:
        line.show("load [1] of 5: ", "n" * 100)
    shown = capsys.readouterr().err.replace("\x1b[0m", "")
    assert f" load [1] of 5: {'n' * 22}" in shown
    assert "n" * 23 not in shown
