"""Settings come from flags, then the environment, then the file; what is unknown is an error that names it."""

import os
import subprocess
import sys

import pytest

from speclen.cli.app import VERBS, main
from speclen.console.errors import UserError


def speclen(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "speclen.cli.app", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "120", **environment},
        check=False,
    )


def run_generate(
    monkeypatch, capsys, *arguments: str, config: str | None = None, tmp_path=None, **environment: str
) -> str:
    """What `speclen generate` says in this process, where nothing listens at the address it ends up with."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = []
    if config is not None:
        (tmp_path / "speclen.toml").write_text(config)
        options = ["--config", str(tmp_path / "speclen.toml")]
    monkeypatch.setattr(sys, "argv", ["speclen", *options, "generate", "x", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err


FILE = '[generate]\nworker = "127.0.0.1:3"\n'


def test_the_file_sets_defaults(monkeypatch, capsys, tmp_path):
    assert "127.0.0.1:3" in run_generate(monkeypatch, capsys, config=FILE, tmp_path=tmp_path)


def test_the_environment_is_stronger_than_the_file(monkeypatch, capsys, tmp_path):
    said = run_generate(monkeypatch, capsys, config=FILE, tmp_path=tmp_path, SPECLEN_GENERATE_WORKER="127.0.0.1:2")
    assert "127.0.0.1:2" in said


def test_a_flag_is_stronger_than_both(monkeypatch, capsys, tmp_path):
    said = run_generate(
        monkeypatch,
        capsys,
        "--worker",
        "127.0.0.1:1",
        config=FILE,
        tmp_path=tmp_path,
        SPECLEN_GENERATE_WORKER="127.0.0.1:2",
    )
    assert "127.0.0.1:1" in said


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[generat]\n", "generat"),
        ('[generate]\nwroker = "x"\n', "'wroker'; did you mean 'worker'"),
        ("[generate\n", "not valid TOML"),
        ("generate = 1\n", "[generate]"),
    ],
)
def test_a_wrong_file_is_named(monkeypatch, capsys, tmp_path, config, words):
    assert words in run_generate(monkeypatch, capsys, config=config, tmp_path=tmp_path)


def test_a_missing_file_is_named():
    result = speclen("--config", "/no/such.toml", "tables")
    assert result.returncode == 2
    assert "/no/such.toml" in result.stderr


def test_a_variable_that_is_no_setting_is_an_error():
    result = speclen("tables", SPECLEN_TABELS_DB="x")
    assert result.returncode == 2
    assert "SPECLEN_TABELS_DB" in result.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb):
    result = speclen(verb, "--help")
    assert result.returncode == 0, result.stderr
    assert f"speclen {verb}" in result.stdout.partition("Example")[2], result.stdout


def test_user_errors_are_exceptions_of_their_own():
    assert not issubclass(UserError, ValueError)  # else a verb's own ValueError would be taken for the user's
