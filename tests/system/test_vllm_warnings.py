"""vLLM keeps serving whatever happens: each problem is one log line with advice."""

import logging
import sys
import time

import pytest

from speclen.integrations.vllm import settings
from tests.support import fake_vllm
from tests.support.vllm_serving import UNREACHABLE, controller, serve
from tests.support.waiting import until


def test_without_a_controller_the_configured_lengths_stay_and_one_line_is_logged(scheduler_for, caplog):
    with caplog.at_level(logging.INFO, logger=settings.LOGGER):
        scheduler = scheduler_for(SPECLEN_CONTROLLER=UNREACHABLE)
        assert serve(scheduler, num_requests=2)[1:] == [5] * 19
        assert serve(scheduler, num_requests=6)[1:] == [2] * 19
        until(lambda: "no controller yet" in caplog.text, what="told")
        time.sleep(1.5)  # two more attempts
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert UNREACHABLE in told[0]
    assert "correct SPECLEN_CONTROLLER" in told[0], "the way out"


NO_TABLE = {"speculative_config__num_speculative_tokens_per_batch_size": None}


@pytest.mark.parametrize(
    ("variables", "changes", "named", "way_out"),
    [
        ({"SPECLEN_CONTROLLER": "off"}, {}, "SPECLEN_CONTROLLER", "is off"),
        ({"SPECLEN_WORKER_POLICY": "n-gram"}, {}, "n-gram is not known here", "--speculative-config"),
        ({"SPECLEN_WORKER_POLICY": "fixed:9"}, {}, "fixed:9", "raise that"),
        ({"SPECLEN_WORKER_CONTROLLER_TOKEN_FILE": "/no/such"}, {}, "CONTROLLER_TOKEN_FILE /no/such", "cannot be read"),
        ({}, {"speculative_config__method": "medusa"}, "'medusa'", "use one of draft_model"),
        ({}, NO_TABLE, "num_speculative_tokens_per_batch_size", "[[1, 8, 5]]"),
    ],
)
def test_bad_input_is_one_warning_and_vllm_keeps_serving(scheduler_for, caplog, variables, changes, named, way_out):
    with caplog.at_level(logging.INFO, logger=settings.LOGGER):
        scheduler = scheduler_for(fake_vllm.config(**changes), **{"SPECLEN_CONTROLLER": UNREACHABLE, **variables})
        serve(scheduler)
    [told] = caplog.records
    assert told.levelno == logging.WARNING
    assert named in told.getMessage()
    assert way_out in told.getMessage()
    assert scheduler.steering is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda patch: fake_vllm.install(patch, "0.31.0"), "vLLM is 0.31.0: upgrade it to 0.33"),
        (lambda patch: patch.delitem(sys.modules, "vllm.v1.outputs"), "vllm.v1.outputs"),
    ],
)
def test_an_unsupported_vllm_is_one_warning_and_keeps_serving(monkeypatch, scheduler_for, caplog, change, words):
    change(monkeypatch)
    with caplog.at_level(logging.WARNING, logger=settings.LOGGER):
        scheduler = scheduler_for(SPECLEN_CONTROLLER=UNREACHABLE)
        assert scheduler.steering is None
        serve(scheduler)
    assert [words in record.getMessage() for record in caplog.records].count(True) == 1


def test_a_wrong_token_and_another_run_are_logged_with_advice(tmp_path, scheduler_for, caplog):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    wrong = tmp_path / "wrong"
    wrong.write_text("fedcba9876543210fedcba9876543210")
    at_info = caplog.at_level(logging.INFO, logger=settings.LOGGER)
    with at_info, controller(tmp_path, token_file=token, run_id="a") as there:
        variables = {"SPECLEN_CONTROLLER": there.address, "SPECLEN_WORKER_CONTROLLER_TOKEN_FILE": str(wrong)}
        refused = scheduler_for(**variables)
        until(lambda: "UNAUTHENTICATED" in caplog.text, what="refused")
        assert "SPECLEN_WORKER_CONTROLLER_TOKEN_FILE" in caplog.text
        assert serve(refused)[1:] == [5] * 19
        other = scheduler_for(SPECLEN_WORKER_CONTROLLER_TOKEN_FILE=str(token), SPECLEN_WORKER_RUN_ID="b")
        until(lambda: "FAILED_PRECONDITION" in caplog.text, what="refused")
        assert "SPECLEN_WORKER_RUN_ID" in caplog.text
        assert serve(other)[1:] == [5] * 19


@pytest.mark.parametrize("hook", ["scheduled", "arrived", "finished"])
def test_a_failure_in_a_hook_disables_the_hooks_alone(scheduler_for, caplog, hook):
    scheduler = scheduler_for(SPECLEN_CONTROLLER=UNREACHABLE)
    steering = scheduler.steering

    def fail(*_):
        raise RuntimeError("a fault of ours")

    setattr(steering, hook, fail)
    with caplog.at_level(logging.INFO, logger=settings.LOGGER):
        serve(scheduler)
    assert "a fault of ours" in caplog.text
    assert "vLLM serves on" in caplog.text
    assert scheduler.steering is None
    steering.reporting.stop()
