"""Settings come from flags, then the environment, then the file; unknown settings are errors that name them."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import grpc
import pytest

from speclen.cli.app import VERBS, main, settings_of_verb
from speclen.cli.support.flags import check_environment
from speclen.cli.support.output import UserError
from speclen.cli.top import rate_cells
from speclen.v1 import control_pb2, generation_pb2, generation_pb2_grpc


def speclen(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process: another one takes a second of imports."""
    said, complained = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "120", **environment}),
        mock.patch.object(sys, "argv", ["speclen", *arguments]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(complained),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    code = ended.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, said.getvalue(), complained.getvalue())


def run_generate(*arguments: str, config: str | None = None, tmp_path=None, **environment: str) -> str:
    """Run `speclen generate` where nothing listens at the address it ends up with."""
    options = []
    if config is not None:
        (tmp_path / "speclen.toml").write_text(config)
        options = ["--config", str(tmp_path / "speclen.toml")]
    result = speclen(*options, "generate", "x", *arguments, **environment)
    assert result.returncode == 2
    return result.stderr


FILE = '[generate]\nworker = "127.0.0.1:3"\n'


def test_flags_override_the_environment_which_overrides_the_file(tmp_path):
    variable = {"SPECLEN_GENERATE_WORKER": "127.0.0.1:2"}
    assert "127.0.0.1:3" in run_generate(config=FILE, tmp_path=tmp_path)
    assert "127.0.0.1:2" in run_generate(config=FILE, tmp_path=tmp_path, **variable)
    assert "127.0.0.1:1" in run_generate("--worker", "127.0.0.1:1", config=FILE, tmp_path=tmp_path, **variable)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[generat]\n", "generat"),
        ('[generate]\nwroker = "x"\n', "'wroker'; did you mean 'worker'"),
        ("[generate\n", "not valid TOML"),
        ("generate = 1\n", "[generate]"),
        ("[generate]\nmax_tokens = 3.9\n", "max_tokens is 3.9, but must be a whole number"),
        ("[generate]\nmax-tokens = true\n", "max-tokens is True, but must be a whole number"),
        ("[generate]\ntemperature = [1]\n", "temperature is [1], but must be a number"),
        ("[generate]\nworker = 2024-01-01\n", "must be a string"),
    ],
)
def test_errors_in_a_settings_file_name_the_setting(tmp_path, config, words):
    assert words in run_generate(config=config, tmp_path=tmp_path)


def test_a_missing_file_and_an_unknown_variable_are_errors():
    missing, unknown = speclen("--config", "/no/such.toml", "tables"), speclen("tables", SPECLEN_TABELS_DB="x")
    assert (missing.returncode, "/no/such.toml" in missing.stderr) == (2, True)
    assert (unknown.returncode, "SPECLEN_TABELS_DB" in unknown.stderr) == (2, True)


# What Kubernetes sets for services named speclen, speclen-worker and speclen-up, and somebody else's.
FOREIGN = """SPECLEN_SERVICE_HOST SPECLEN_SERVICE_PORT SPECLEN_SERVICE_PORT_GRPC SPECLEN_PORT SPECLEN_PORT_7070_TCP
    SPECLEN_PORT_7070_TCP_ADDR SPECLEN_PORT_7070_TCP_PROTO SPECLEN_WORKER_SERVICE_HOST SPECLEN_WORKER_PORT_7080_TCP_PORT
    SPECLEN_UP_PORT SPECLEN_HOME"""
OURS = """SPECLEN_CLIENT_TOKEN_FILE SPECLEN_WORKER_MAX_BATCH_SIZE SPECLEN_PROFILE_RUN_QUICK SPECLEN_BENCH_SERVE_OUT
    SPECLEN_CONFIG"""


@pytest.mark.parametrize("name", [*FOREIGN.split(), *OURS.split()])
def test_foreign_variables_and_our_own_are_accepted(name):
    """Story: next to a Kubernetes service named speclen every verb ended with exit code 2, in a crash loop."""
    check_environment([name], [*VERBS, "client"], settings_of_verb)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SPECLEN_WORKER_MAX_BATCHSIZE", "SPECLEN_WORKER_MAX_BATCH_SIZE"),
        ("SPECLEN_WORKR_LISTEN", "SPECLEN_WORKER_LISTEN"),
        ("SPECLEN_CONTROLER_DB", "SPECLEN_CONTROLLER_DB"),
        ("SPECLEN_CLIENT_TOKENFILE", "SPECLEN_CLIENT_TOKEN_FILE"),
        ("SPECLEN_PROFILE_RUN_QICK", "SPECLEN_PROFILE_RUN_QUICK"),
        ("SPECLEN_CONFG", "SPECLEN_CONFIG"),
        ("SPECLEN_TOP_NONSENSE", "it may be one of SPECLEN_TOP_{"),
    ],
)
def test_a_misspelt_setting_gets_a_suggestion(name, meant):
    with pytest.raises(UserError, match=re.escape(name)) as error:
        check_environment([name], [*VERBS, "client"], settings_of_verb)
    assert meant in str(error.value)


def test_a_misspelt_verb_gets_a_suggestion():
    result = speclen("genrate", "x")
    assert result.returncode == 2
    assert result.stderr.strip() == "speclen: there is no verb 'genrate'; did you mean 'generate'?"


VALUES = (
    f"--top-k -1,--seed -1,--seed {2**64},--max-tokens {2**32},--temperature nan,--temperature -1,--top-p 2,--n 65,"
)
VALUES += "--timeout-s nan,--timeout-s 1e300,--speculation 99999999999999999999,--stop \udcff,--worker nowhere"


@pytest.mark.parametrize("arguments", [each.split() for each in VALUES.split(",")])
def test_values_that_a_message_cannot_hold_are_refused_by_flag(arguments):
    """Story: these ended with tracebacks, or waited for a worker first."""
    result = speclen("generate", "x", "--worker", "127.0.0.1:1", *arguments)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert "answers at" not in result.stderr
    assert arguments[0] in result.stderr or "UTF-8" in result.stderr


SUBVERBS = """profile run, profile show, profile export, profile import,
    bench serve, bench step, bench policy, bench gain, bench controller, bench fleet"""


@pytest.mark.parametrize("verb", [*VERBS, *re.split(r",\s+", SUBVERBS)])
def test_help_has_an_example_fits_80_columns_and_keeps_its_brackets(verb):
    said = speclen(*verb.split(), "--help", COLUMNS="80").stdout
    assert f"speclen {verb}" in said.partition("Example")[2], said
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in said, said
    assert verb != "dashboard" or "pip install 'speclen[inspect]'" in said


class Answering(generation_pb2_grpc.GenerationServiceServicer):
    """A worker that says of itself that it took nine steps."""

    def GetServerInfo(self, request, context):  # noqa: N802
        return generation_pb2.GetServerInfoResponse(num_steps=9)


@contextlib.contextmanager
def listening(*, worker: bool):
    """The address of a worker, or of a server of another kind."""
    server = grpc.server(ThreadPoolExecutor(1))
    if worker:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(Answering(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def test_top_as_json_names_workers_that_do_not_answer_and_why():
    """Story: it printed null and ended with exit code 0, even for the address of a controller."""
    with listening(worker=True) as worker, listening(worker=False) as other:
        neither = speclen("top", "--json", "--worker", "127.0.0.1:1", "--worker", other)
        assert (neither.returncode, neither.stdout) == (2, "")
        assert "no worker answers at 127.0.0.1:1" in neither.stderr
        assert f"{other} is not a speclen worker" in neither.stderr
        some = speclen("top", "--json", "--worker", worker, "--worker", other)
        assert some.returncode == 0
        answers = json.loads(some.stdout)
        assert (answers[worker]["num_steps"], answers[other]) == ("9", None)
        assert some.stderr.startswith(f"speclen: {other} is not a speclen worker")
        all_of_them = speclen("top", "--json", "--worker", worker)
        assert (all_of_them.returncode, all_of_them.stderr) == (0, "")


def test_top_shows_no_rates_across_a_restart():
    """Story: rates were negative, since the counters of a new process begin at 0."""
    first, second = (control_pb2.WorkerIdentity(worker_id="w", epoch=epoch) for epoch in (1, 2))
    info = generation_pb2.GetServerInfoResponse
    before, after = info(worker=first, num_steps=900, num_generated_tokens=2000), info(worker=second, num_steps=9)
    assert rate_cells(after, before, 1.0) == ["", "", ""]
    later = info(worker=first, num_steps=910, num_generated_tokens=2020)
    assert rate_cells(later, before, 1.0) == ["20", "2.0", ""]


@pytest.mark.parametrize("arguments", [["worker", "--controller", "off"], ["profile", "run", "--no-store"]])
def test_a_verb_that_needs_the_engine_names_the_extra_to_install(tmp_path, arguments):
    code = "import sys; sys.modules['torch'] = None; from speclen.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    *_, said = done.stderr.splitlines()
    assert (done.returncode, said) == (
        2,
        "speclen: the engine is not installed here (torch is missing): pip install 'speclen[worker]'",
    )
