"""A failing standard output ends a command with one sentence, and text is printed on any terminal."""

import os
import sys
from pathlib import Path

import pytest

from speclen.cli.app import main
from speclen.cli.generate import print_stream
from speclen.cli.support.output import printing
from speclen.v1 import generation_pb2 as pb

CHUNKS = [pb.GenerateResponse(chunk=pb.GenerateChunk(text=text)) for text in ("naïve ", "😀", " end")]
FULL = Path("/dev/full")


@pytest.mark.parametrize(("encoding", "told"), [("ascii", "na\\xefve \\U0001f600 end"), ("utf-8", "naïve 😀 end")])
def test_text_is_printed_whatever_the_terminal_can_show(tmp_path, monkeypatch, encoding, told):
    with open(tmp_path / "out", "w", encoding=encoding) as out:
        monkeypatch.setattr(sys, "stdout", out)
        with printing():
            print_stream(CHUNKS, as_json=False)
        assert sys.stdout is out
    assert (tmp_path / "out").read_text(encoding) == told


def code_of_version(monkeypatch, out) -> int:
    """Exit code of `speclen --version` that prints to this file."""
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["speclen", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
def test_a_full_disk_is_reported_for_buffered_output(monkeypatch, capsys):
    with FULL.open("w") as out:
        assert code_of_version(monkeypatch, out) == 2
    assert capsys.readouterr().err.startswith("speclen: cannot write to standard output: No space left on device")


def test_a_closed_pipe_ends_the_command_quietly(monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        assert code_of_version(monkeypatch, out) == 1
    assert capsys.readouterr().err == ""
