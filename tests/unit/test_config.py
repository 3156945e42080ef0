"""Settings that cannot work are refused by the name of their flag before anything starts."""

import re
import socket
from pathlib import Path

import pytest

from speclen.controller.config import ControllerConfig
from speclen.records import PLAIN, Arm, Limits
from speclen.worker.config import WorkerConfig, parse_policy
from speclen.worker.frontend.worker_server import check_config, initial_table


@pytest.mark.parametrize(
    "policy", ["", "fixed", "fixed:", "fixed:-1", "fixed:x", "draft 65", "Adaptive", "copy", "arms"]
)
def test_unknown_policies_are_named(policy):
    with pytest.raises(ValueError, match="--policy"):
        parse_policy(policy)


@pytest.mark.parametrize(
    ("settings", "arms", "follows", "ngram"),
    [
        ({"policy": "n-gram else draft 3"}, {Arm(3, True)}, False, True),
        ({"policy": "n-gram"}, {Arm(0, True)}, False, True),
        ({"draft": ""}, {Arm(0, True)}, True, True),
        ({"draft": "none"}, {Arm(0, True)}, True, True),
        ({"draft": "none", "ngram": False}, {PLAIN}, True, False),
        ({"draft": "", "policy": "none"}, {PLAIN}, False, False),
        ({"ngram": False}, {Arm(2)}, True, False),
        ({"policy": "fixed:3"}, {Arm(3)}, False, False),
    ],
)
def test_the_first_table_may_have_n_grams(settings, arms, follows, ngram):
    config = WorkerConfig(**settings, max_batch_size=4)
    assert config.may_use_ngrams is ngram
    table, follow = initial_table(config, Limits(4, 8 if config.has_draft else 0, ngram))
    assert (set(table.arms[1:]), follow) == (arms, follows)


HTTP = {"http_listen": "127.0.0.1:8000"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": "fixed:9"}, "fixed:9 is over --max-length 8"),
        ({"policy": "profile"}, "--policy profile needs --profile FILE"),
        ({"policy": "fixed:3", "draft": ""}, "--policy fixed:3 needs a draft model: give a --draft"),
        ({"max_kv_tokens": 10}, "--max-kv-tokens is 10; it must be 0, for as many as fit, or at least 256"),
        ({"backend": "x"}, "--backend 'x' is not known; use auto, torch, openvino"),
        ({"dtype": "x"}, "--dtype 'x' is not known; use auto, float32, bfloat16, float16"),
        ({"device": "x"}, "--device 'x' is not known; use auto, cpu, cuda or cuda:N"),
        ({"device": "mps"}, "--device 'mps' is not known; use auto, cpu, cuda or cuda:N"),
        ({"http_listen": "0.0.0.0:8000"}, "open to other machines"),
        (HTTP | {"http_allow_origin": "https://a.example/"}, "'https://a.example/' is not an origin"),
        (HTTP | {"http_allow_origin": "*, chat.example"}, "--http-allow-origin 'chat.example' is not an"),
        ({"http_listen": "8000"}, "--http-listen '8000' is not HOST:PORT"),
        (HTTP | {"api_key_file": Path("/no/such/file")}, "cannot be read"),
        (HTTP | {"chat_template": Path("/no/such/file")}, "--chat-template"),
    ],
)
def test_invalid_worker_settings_are_refused_before_torch_is_imported(settings, words):
    with pytest.raises(ValueError, match=words):
        WorkerConfig(**settings).check_http()


def test_the_token_of_grpc_protects_http_unless_it_has_a_key(tmp_path):
    token, key = tmp_path / "token", tmp_path / "key"
    assert WorkerConfig(token_file=token).http_security().token_file == token
    assert WorkerConfig(token_file=token, api_key_file=key).http_security().token_file == key
    assert WorkerConfig(token_file=token, api_key_file=key).token_file == token


@pytest.mark.parametrize("name", ["listen", "http_listen", "metrics_listen", "probe_listen"])
def test_a_taken_port_is_reported_before_a_model_is_loaded(name):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = WorkerConfig(**{"listen": "127.0.0.1:0", name: f"127.0.0.1:{taken.getsockname()[1]}"})
        with pytest.raises(OSError, match=f"cannot listen on .*; choose another with --{name.replace('_', '-')}"):
            check_config(config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "cuda:99"}, "device 'cuda:99' "),
        ({"backend": "openvino", "dtype": "float16", "device": "cpu"}, "--backend openvino: "),
    ],
)
def test_settings_that_this_machine_cannot_run_are_refused_before_loading(settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        check_config(WorkerConfig(listen="127.0.0.1:0", **settings))


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"listen": "7070"}, "--listen"),
        ({"listen": "0.0.0.0:7070"}, "--listen"),
        ({"tls_cert": Path("c")}, "--tls-key"),
        ({"tls_client_ca": Path("c")}, "--tls-cert"),
        ({"metrics_listen": "0.0.0.0:9090"}, "--metrics-listen"),
        ({"commit_interval_s": 0.0}, "--commit-interval-s"),
        ({"commit_interval_s": float("nan")}, "--commit-interval-s"),
        ({"keep_reports": 0}, "--keep-reports"),
        ({"keep_days": -1.0}, "--keep-days"),
        ({"max_streams": 0}, "--max-streams"),
        ({"max_workers": 0}, "--max-workers"),
        ({"max_contexts": 0}, "--max-contexts"),
        ({"silence_s": 0.0}, "--silence-s"),
        ({"drain_timeout_s": -1.0}, "--drain-timeout-s"),
    ],
)
def test_invalid_controller_settings_are_named(options, flag):
    with pytest.raises(ValueError, match=flag):
        ControllerConfig(**options)
