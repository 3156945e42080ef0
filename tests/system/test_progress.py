"""The line about the work in hand, in a terminal and in a file."""

from speclen.cli.support.progress import LiveLine


def test_where_there_is_no_terminal_each_text_is_a_line_once(capsys):
    with LiveLine() as line:
        for seconds in range(3):
            line.show("load 1 of 5", f", {seconds} s")
        line.show(f"load 2 of 5: {'word ' * 16}".strip())
    first, second, rest = capsys.readouterr().err.splitlines()
    assert (first, rest) == ("load 1 of 5", "word word word")
    assert second.startswith("load 2 of 5: word word")
    assert len(second) <= 79


def test_in_a_terminal_the_line_is_cut_to_its_width(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    with LiveLine() as line:
        line.show("load [1] of 5: ", "n" * 100)
    shown = capsys.readouterr().err.replace("\x1b[0m", "")
    assert f" load [1] of 5: {'n' * 22}" in shown
    assert "n" * 23 not in shown
