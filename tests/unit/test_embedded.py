"""Directory of an embedded controller, the controller that serves a database, and the database that a verb reads."""

import os
from pathlib import Path

import pytest

from speclen.cli.app import with_client_defaults
from speclen.cli.support.database import default_database
from speclen.process import embedded
from speclen.process.embedded import EmbeddedController, data_directory, make_directory, published, serving
from speclen.v1 import control_pb2 as pb
from speclen.worker.reporting.control_stream import finder

CONTEXT = pb.ContextKey(target="t", draft="d", device="cpu")


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        ({"SPECLEN_DATA_DIR": "/data", "XDG_STATE_HOME": "/state", "HOME": "/home/a"}, "/data"),
        ({"XDG_STATE_HOME": "/state", "HOME": "/home/a"}, "/state/speclen"),
        ({"XDG_STATE_HOME": "state", "HOME": "/home/a"}, "/home/a/.local/state/speclen"),  # XDG: ignore relative paths
        ({"SPECLEN_DATA_DIR": "", "XDG_STATE_HOME": "", "HOME": "/home/a"}, "/home/a/.local/state/speclen"),
    ],
)
def test_the_data_directory_is_the_users_state_directory_unless_another_is_named(monkeypatch, environment, directory):
    monkeypatch.setenv("HOME", environment["HOME"])
    assert str(data_directory(environment)) == directory


def test_without_a_home_a_directory_has_to_be_named(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_711_000)  # of no entry in the list of users, as in a container
    with pytest.raises(ValueError, match=r"no home directory .*: name one with SPECLEN_DATA_DIR"):
        data_directory({})


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("file", r"speclen cannot be made \(File exists\)"),
        ("below a file", r"cannot be made \(Not a directory\)"),
        ("another's", r"belongs to another user \(uid 4711\)"),
        ("not writable", "cannot be written"),
    ],
)
def test_a_directory_that_cannot_be_used_is_one_sentence_with_the_way_out(tmp_path, monkeypatch, kind, words):
    directory = tmp_path / "speclen"
    if kind == "file":
        directory.touch()
    elif kind == "below a file":
        (tmp_path / "f").touch()
        directory = tmp_path / "f" / "speclen"
    elif kind == "another's":
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(Path, "stat", lambda self: os.stat_result([0o40700, 1, 1, 1, 4711, 1, 0, 0, 0, 0]))
    else:
        monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OSError, match=f"{words}: name another directory with SPECLEN_DATA_DIR"):
        make_directory(directory)


def test_a_new_directory_is_its_owners_alone(tmp_path):
    make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    make_directory(tmp_path / "a" / "b")


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"version": "0.0.1"}])
async def test_a_controller_of_another_machine_is_refused_and_one_of_another_version_joined(
    tmp_path, monkeypatch, capsys, change
):
    monkeypatch.setattr(embedded, "serving", lambda database: real(database)._replace(**change))
    real = serving
    controller = EmbeddedController({"SPECLEN_DATA_DIR": str(tmp_path)})
    with published(tmp_path / "speclen.db", "127.0.0.1:7"):
        if "host" in change:
            with pytest.raises(OSError, match="a controller on elsewhere: name a directory of this machine"):
                await controller.address()
        else:
            assert await controller.address() == await controller.address() == "127.0.0.1:7"
            assert capsys.readouterr().out.count("is of speclen 0.0.1 and this is") == 1
    controller.close()


async def test_a_path_that_is_too_long_for_a_socket_is_one_sentence(tmp_path):
    controller = EmbeddedController({"SPECLEN_DATA_DIR": str(tmp_path / ("d" * 100))})
    with pytest.raises(ValueError, match=r"over the system's 103: name a shorter directory with SPECLEN_DATA_DIR"):
        await controller.address()
    controller.close()


@pytest.mark.parametrize(
    ("addresses", "found"), [("off", None), ("", None), ("a:1", "a:1"), (" a:1 , b:2", "b:2"), ("b:2,a:1", "b:2")]
)
async def test_a_worker_has_the_controller_that_is_named_or_none(addresses, found):
    find = finder(addresses, CONTEXT)
    assert (None if find is None else await find()) == found


def test_two_variables_are_defaults_of_every_verb_that_has_the_setting(monkeypatch):
    monkeypatch.setenv("SPECLEN_CONTROLLER", "a:1")
    monkeypatch.setenv("SPECLEN_DATA_DIR", "/data")
    own = {"up": {"data_dir": "/own"}}
    assert with_client_defaults(own) | {"profile": {}, "generate": {}, "top": {}, "hold": {}} == {
        "worker": {"controller": "a:1"},
        "controller": {"data_dir": "/data"},
        "up": {"data_dir": "/own"},
        **{verb: {} for verb in ("profile", "generate", "top", "hold")},
    }


@pytest.mark.parametrize(
    ("environment", "is_here", "database"),
    [
        ({}, False, "/state/speclen/speclen.db"),
        ({}, True, ".speclen/speclen.db"),
        ({"SPECLEN_DATA_DIR": "/data"}, True, "/data/speclen.db"),
        ({"SPECLEN_DATA_DIR": "/data", "SPECLEN_CONTROLLER_DATA_DIR": "/own"}, True, "/own/speclen.db"),
        ({"SPECLEN_CONTROLLER_DATA_DIR": "/own", "SPECLEN_CONTROLLER_DB": "/a.db"}, True, "/a.db"),
    ],
)
def test_a_verb_reads_the_database_that_is_meant(tmp_path, monkeypatch, environment, is_here, database):
    monkeypatch.chdir(tmp_path)
    for name, value in ({"XDG_STATE_HOME": "/state"} | environment).items():
        monkeypatch.setenv(name, value)
    if is_here:
        (tmp_path / ".speclen").mkdir()
        (tmp_path / ".speclen" / "speclen.db").touch()
    assert str(default_database()) == database
