"""vLLM as a worker: it joins a controller, takes its table, and serves on whatever happens.

The scheduler's hooks run on a base with vLLM's interface (fake_vllm); the controller is a real one.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import structlog

from speclen.integrations.vllm import logs
from speclen.integrations.vllm.context import configured_table, context_key, limits_of
from speclen.integrations.vllm.lengths import MIN_SAMPLES
from speclen.integrations.vllm.settings import as_variables, settings_from
from speclen.records import PLAIN, Arm, Limits
from tests.support import fake_vllm
from tests.support.control_fakes import served
from tests.support.waiting import until

NOBODY = "127.0.0.1:9"  # the port of discard: nobody listens there
SLOW_S = 0.4


@pytest.fixture
def integration(monkeypatch):
    """The package, with vLLM's modules in place and no settings of ours in the environment."""
    fake_vllm.install(monkeypatch)
    for name in [name for name in os.environ if name.startswith("SPECLEN_")]:
        monkeypatch.delenv(name)
    structlog.reset_defaults()
    yield importlib.import_module("speclen.integrations.vllm")
    structlog.reset_defaults()


@pytest.fixture
def scheduler_for(integration, monkeypatch):
    """Makes a scheduler as vLLM does, with variables set; all are shut down at the end."""
    made = []

    def make(config=None, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        scheduler = integration.Scheduler(vllm_config=config or fake_vllm.config())
        made.append(scheduler)
        return scheduler

    yield make
    for scheduler in made:
        scheduler.shutdown()


def serve(scheduler, num_steps=20, num_requests=2):
    """Steps as vLLM's engine takes them, one ahead where they overlap; the lengths that were drafted."""
    for number in range(num_requests):
        scheduler.add(f"r{number}", 10)
    lengths, in_flight, is_overlapped = [], [], isinstance(scheduler, fake_vllm.AsyncScheduler)
    for _ in range(num_steps):
        in_flight.append(scheduler.schedule())
        lengths.append(in_flight[-1].num_spec_tokens_to_schedule)
        if len(in_flight) > is_overlapped:
            end(scheduler, in_flight.pop(0))
        time.sleep(0.001)
    for output in in_flight:
        end(scheduler, output)
    return lengths


def end(scheduler, output):
    """The result of a step: every sequence accepts one token."""
    drafts = output.scheduled_spec_decode_tokens
    rows = {name: min(1, len(drafts.get(name, ()))) for name in output.num_scheduled_tokens}
    scheduler.update_from_output(output, fake_vllm.sampled(rows))
    if not isinstance(scheduler, fake_vllm.AsyncScheduler):
        scheduler.update_draft_token_ids(output)


def joined(scheduler):
    """The scheduler, known to its controller."""
    until(lambda: scheduler.steering.control.connected, what="joined")
    return scheduler


def check_reported(scheduler):
    """All of its reports are on the controller's disk, and none was refused."""
    control = scheduler.steering.control
    until(lambda: not control.buffer, what="reports on disk")
    assert control.num_refused == 0


@contextlib.contextmanager
def controller(tmp_path, **options):
    """A controller in a thread of its own, since the test is the engine."""
    ready, ended, found = threading.Event(), threading.Event(), []

    async def hold():
        async with served(tmp_path, **options) as each:
            found.append(each)
            ready.set()
            while not ended.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(hold()))
    thread.start()
    assert ready.wait(20)
    try:
        yield found[0]
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(("overlapped", "replica", "name"), [(False, 0, "mine"), (True, 1, "mine-1")])
def test_vllm_joins_takes_the_table_and_reports(tmp_path, scheduler_for, overlapped, replica, name):
    config = fake_vllm.config(
        scheduler_config__async_scheduling=overlapped, parallel_config__data_parallel_index=replica
    )
    with controller(tmp_path, policy="fixed:3") as there:
        scheduler = joined(scheduler_for(config, SPECLEN_CONTROLLER=there.address, SPECLEN_WORKER_WORKER_ID="mine"))
        assert isinstance(scheduler, fake_vllm.AsyncScheduler) is overlapped, "as the configuration wants it"
        lengths = serve(scheduler, num_steps=60)
        first = lengths.index(3)
        assert lengths == [5] * first + [3] * (60 - first), "the configured length, then the controller's"
        assert MIN_SAMPLES < first < MIN_SAMPLES + 8
        check_reported(scheduler)
        assert scheduler.steering.num_reported >= 55
        assert scheduler.steering.tracker.num_odd == 0
        assert 0 < scheduler.steering.cost.quantile(0.5) < 1000
        card = scheduler.steering.control.card
        assert (card.worker_id, card.probe_steps) == (name, 5 if overlapped else 4)
        assert card.context.engine_fingerprint.startswith("vllm 0.32.0,draft_model,tp=1,pp=1,")


def test_what_it_costs_is_told_now_and_then(scheduler_for, caplog, monkeypatch):
    monkeypatch.setattr("speclen.integrations.vllm.background.TELL_S", 0.1)
    with caplog.at_level(logging.INFO, logger=logs.LOGGER):
        scheduler = scheduler_for(SPECLEN_CONTROLLER=NOBODY)
        serve(scheduler)
        until(lambda: "steps reported (steps=19, left_out=0, median_us=" in caplog.text, what="told")


def test_without_a_controller_the_configured_lengths_stay_and_one_line_says_so(scheduler_for, caplog):
    with caplog.at_level(logging.INFO, logger=logs.LOGGER):
        scheduler = scheduler_for(SPECLEN_CONTROLLER=NOBODY)
        assert serve(scheduler, num_requests=2)[1:] == [5] * 19
        assert serve(scheduler, num_requests=6)[1:] == [2] * 19
        until(lambda: "no controller yet" in caplog.text, what="told")
        time.sleep(1.5)  # two more attempts
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert NOBODY in told[0]
    assert "correct SPECLEN_CONTROLLER" in told[0], "the way out"


def test_when_the_controller_goes_its_last_table_stays(tmp_path, scheduler_for):
    with controller(tmp_path, policy="fixed:1") as there:
        scheduler = joined(scheduler_for(SPECLEN_CONTROLLER=there.address))
    until(lambda: not scheduler.steering.control.connected, what="noticed")
    assert serve(scheduler, num_steps=60)[-30:] == [1] * 30


def test_a_controller_that_never_answers_delays_no_step(scheduler_for):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        scheduler = scheduler_for(SPECLEN_CONTROLLER=f"127.0.0.1:{silent.getsockname()[1]}")
        assert serve(scheduler, num_steps=60)[1:] == [5] * 59, "the configured length"
        assert 1e-6 * scheduler.steering.cost.quantile(1.0) < SLOW_S / 2
        assert scheduler.steering.num_reported == 59


def test_a_slow_controller_delays_no_step_and_gets_all_reports(tmp_path, scheduler_for):
    with controller(tmp_path, policy="fixed:3") as there:
        for name in ("learn", "table"):  # each takes SLOW_S, in which the controller does nothing else
            act = getattr(there.service, name)
            setattr(there.service, name, lambda *given, act=act: time.sleep(SLOW_S) or act(*given))
        scheduler = joined(scheduler_for(SPECLEN_CONTROLLER=there.address))
        assert serve(scheduler, num_steps=60)[-1] == 3
        check_reported(scheduler)
        assert 1e-6 * scheduler.steering.cost.quantile(1.0) < SLOW_S / 2
        assert scheduler.steering.num_reported == 59


@pytest.mark.parametrize(("before", "after", "last"), [(5, 2, 2), (2, 7, 5)])
def test_vllm_starts_again_with_another_longest_length(tmp_path, scheduler_for, before, after, last):
    """The controller goes on, and has a table of the engine before it under the same worker's name."""
    with controller(tmp_path, policy="fixed:5") as there:
        variables = {"SPECLEN_CONTROLLER": there.address, "SPECLEN_WORKER_WORKER_ID": "mine"}
        for longest in (before, after):
            config = fake_vllm.config(speculative_config__num_speculative_tokens=longest)
            config.speculative_config.num_speculative_tokens_per_batch_size = [(1, 8, longest)]
            scheduler = joined(scheduler_for(config, **variables))
            lengths = serve(scheduler, num_steps=60)
            check_reported(scheduler)
            scheduler.shutdown()
        assert (lengths[1], lengths[-1]) == (after, last)


def test_a_policy_of_its_own_is_kept_and_reported(tmp_path, scheduler_for):
    with controller(tmp_path, policy="fixed:1") as there:
        scheduler = joined(scheduler_for(SPECLEN_CONTROLLER=there.address, SPECLEN_WORKER_POLICY="fixed:4"))
        assert serve(scheduler)[1:] == [4] * 19
        check_reported(scheduler)


NO_TABLE = {"speculative_config__num_speculative_tokens_per_batch_size": None}


@pytest.mark.parametrize(
    ("variables", "changes", "named", "way_out"),
    [
        ({"SPECLEN_CONTROLLER": ""}, {}, "SPECLEN_CONTROLLER", "give the address"),
        ({"SPECLEN_CONTROLLER": "nowhere"}, {}, "'nowhere'", "HOST:PORT"),
        ({"SPECLEN_WORKER_POLICY": "clever"}, {}, "'clever'", "use adaptive"),
        ({"SPECLEN_WORKER_POLICY": "n-gram"}, {}, "n-gram is not known here", "--speculative-config"),
        ({"SPECLEN_WORKER_POLICY": "fixed:9"}, {}, "fixed:9", "raise that"),
        ({"SPECLEN_WORKER_CONTROLLER_TOKEN_FILE": "/no/such"}, {}, "CONTROLLER_TOKEN_FILE /no/such", "cannot be read"),
        ({"SPECLEN_WORKER_CONTROLLER_CERT": "/a.pem"}, {}, "SPECLEN_WORKER_CONTROLLER_KEY", "give both"),
        ({}, {"speculative_config": None}, "no speculative config", "--speculative-config"),
        ({}, {"speculative_config__method": "medusa"}, "'medusa'", "use one of draft_model"),
        ({}, {"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size is 2", "tensor_parallel_size"),
        ({}, NO_TABLE, "num_speculative_tokens_per_batch_size", "[[1, 8, 5]]"),
        ({}, {"parallel_config__data_parallel_size": 4}, "data_parallel_size is 4", "start 4 servers"),
        ({}, {"speculative_config__num_speculative_tokens": 99}, "99", "give less"),
    ],
)
def test_bad_input_is_one_warning_and_vllm_serves_on(scheduler_for, caplog, variables, changes, named, way_out):
    with caplog.at_level(logging.INFO, logger=logs.LOGGER):
        scheduler = scheduler_for(fake_vllm.config(**changes), **{"SPECLEN_CONTROLLER": NOBODY, **variables})
        serve(scheduler)
    [told] = caplog.records
    assert told.levelno == logging.WARNING
    assert named in told.getMessage()
    assert way_out in told.getMessage()
    assert scheduler.steering is None


def other_version(monkeypatch):
    fake_vllm.install(monkeypatch, "0.99.0")


def without_a_field(monkeypatch):
    monkeypatch.delitem(fake_vllm.SchedulerOutput.__dataclass_fields__, "num_spec_tokens_to_schedule")


def without_a_module(monkeypatch):
    monkeypatch.delitem(sys.modules, "vllm.v1.outputs")


@pytest.mark.parametrize(
    ("change", "is_on", "words"),
    [
        (other_version, True, "vLLM 0.99.0 was not tried"),
        (without_a_field, False, "vLLM 0.32.0 has no SchedulerOutput.num_spec_tokens_to_schedule"),
        (without_a_module, False, "vllm.v1.outputs"),
    ],
)
def test_another_vllm_is_one_warning_and_serves_on(monkeypatch, scheduler_for, caplog, change, is_on, words):
    change(monkeypatch)
    with caplog.at_level(logging.WARNING, logger=logs.LOGGER):
        scheduler = scheduler_for(SPECLEN_CONTROLLER=NOBODY)
        assert (scheduler.steering is not None) is is_on
        serve(scheduler)
    assert [words in record.getMessage() for record in caplog.records].count(True) == 1


def test_a_wrong_token_and_another_run_are_told_with_the_way_out(tmp_path, scheduler_for, caplog):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    wrong = tmp_path / "wrong"
    wrong.write_text("fedcba9876543210fedcba9876543210")
    at_info = caplog.at_level(logging.INFO, logger=logs.LOGGER)
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
def test_whatever_fails_in_a_hook_ends_the_hooks_alone(scheduler_for, caplog, hook):
    scheduler = scheduler_for(SPECLEN_CONTROLLER=NOBODY)
    steering = scheduler.steering

    def fail(*_):
        raise RuntimeError("a fault of ours")

    setattr(steering, hook, fail)
    with caplog.at_level(logging.INFO, logger=logs.LOGGER):
        serve(scheduler)
    assert "a fault of ours" in caplog.text
    assert "vLLM serves on" in caplog.text
    assert scheduler.steering is None
    steering.reporting.stop()


@pytest.mark.parametrize(
    ("num_slots", "admitted", "kept_waiting"),
    [(8, 1, True), (8, 0, False), (4, 1, False)],
    ids=["time", "memory", "slot"],
)
def test_only_requests_that_wait_for_time_keep_probes_waiting(scheduler_for, num_slots, admitted, kept_waiting):
    """Under saturation requests wait at every step, and no probe would ever begin."""
    config = fake_vllm.config(scheduler_config__max_num_seqs=num_slots)
    config.speculative_config.num_speculative_tokens_per_batch_size = [(1, num_slots, 5)]
    scheduler = scheduler_for(config, SPECLEN_CONTROLLER=NOBODY)
    control, asked = scheduler.steering.control, []
    choose = control.choose
    control.choose = lambda size, with_prefill=False: asked.append(with_prefill) or choose(size, with_prefill)
    serve(scheduler, num_steps=4, num_requests=3)
    assert asked == [False] * 4
    for name in ("next", "later"):
        scheduler.add(name, 10)
    scheduler.most_admitted = admitted
    scheduler.schedule()
    assert asked[-1] is kept_waiting


FULL_GRAPHS = {"use_v2_model_runner": True, "compilation_config__cudagraph_mode": "FULL_AND_PIECEWISE"}


def test_v2_is_asked_for_lengths_with_graphs_alone(tmp_path, scheduler_for):
    with controller(tmp_path, policy="fixed:3") as there:
        scheduler = joined(scheduler_for(fake_vllm.config(**FULL_GRAPHS), SPECLEN_CONTROLLER=there.address))
        assert {*serve(scheduler, num_steps=60)} == {5, 2}, "the configured one, then the nearest to 3"


def test_one_length_with_graphs_is_told_with_the_way_out(scheduler_for, caplog):
    config = fake_vllm.config(**FULL_GRAPHS)
    config.speculative_config.num_speculative_tokens_per_batch_size = [(1, 8, 4)]
    with caplog.at_level(logging.WARNING, logger=logs.LOGGER):
        scheduler_for(config, SPECLEN_CONTROLLER=NOBODY)
    assert "all batch sizes run at length 4" in caplog.text
    assert "name all that may be chosen" in caplog.text


def test_the_context_names_what_step_times_depend_on():
    settings = settings_from({"SPECLEN_CONTROLLER": NOBODY})
    key = context_key(fake_vllm.config(), settings, fake_vllm.PLATFORM, "0.32.0")
    assert key.target.startswith("target#")
    assert key.draft.startswith("draft#")
    assert key.dtype == "bfloat16"
    assert key.device.startswith("cpu:")
    for change in (
        {"parallel_config__tensor_parallel_size": 2},
        {"speculative_config__method": "ngram"},
        {"model_config__enforce_eager": False},
        {"cache_config__cache_dtype": "fp8"},
    ):
        other = context_key(fake_vllm.config(**change), settings, fake_vllm.PLATFORM, "0.32.0")
        assert other.engine_fingerprint != key.engine_fingerprint, change
    gpu = SimpleNamespace(is_cpu=lambda: False, device_type="cuda", get_device_name=lambda: "NVIDIA H100")
    several = fake_vllm.config(parallel_config__world_size=4)
    assert context_key(several, settings, gpu, "0.32.0").device == "cuda:NVIDIA H100 x4"
    named = settings_from({"SPECLEN_CONTROLLER": NOBODY, "SPECLEN_WORKER_TARGET": "bundled:target"})
    assert context_key(fake_vllm.config(), named, fake_vllm.PLATFORM, "0.32.0").target.startswith("bundled:target#")


def test_the_configured_table_is_vllms_own():
    lookup = fake_vllm.lookup_of(fake_vllm.config())
    limits = limits_of(lookup, 5)
    assert limits == Limits(8, 5)
    assert configured_table(lookup, "adaptive", limits).arms[1:] == (*[Arm(5)] * 4, *[Arm(2)] * 4)
    assert configured_table(lookup, "none", limits).arms[1:] == (PLAIN,) * 8


def test_sentences_name_variables_for_our_flags_and_leave_vllms():
    sentence = as_variables("--controller-ca needs --policy and --speculative-config")
    assert sentence == "SPECLEN_WORKER_CONTROLLER_CA needs SPECLEN_WORKER_POLICY and --speculative-config"
