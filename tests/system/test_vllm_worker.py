"""vLLM as a worker: it joins a controller, takes its table and reports; each problem is one log line, and it keeps serving.

The scheduler's hooks run on a base with vLLM's interface (fake_vllm); the controller is a real one.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from speclen.controller.estimator import EstimatorSettings
from speclen.integrations.vllm import settings, startup
from speclen.integrations.vllm.steering import MIN_SAMPLES
from speclen.process.embedded import serving
from tests.support import fake_vllm
from tests.support.control_fakes import served
from tests.support.waiting import PATIENCE_S, until

UNREACHABLE = "127.0.0.1:9"  # the discard port: nothing listens there


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


def logged(caplog):
    """Records of the plugin; gRPC complains of the event loops of earlier tests."""
    return [record for record in caplog.records if record.name == settings.LOGGER]


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
def controller(tmp_path, length=2, **options):
    """A controller in its own thread, since the test's thread is the engine. length: the one that it always selects."""
    believed = EstimatorSettings(cold_length=length, hysteresis=1e3, explored=1e-9)
    ready, ended, found = threading.Event(), threading.Event(), []

    async def hold():
        async with served(tmp_path, **options) as each:
            each.service.estimators.settings = believed
            found.append(each)
            ready.set()
            while not ended.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(hold()))
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield found[0]
    finally:
        ended.set()
        thread.join()


SLOW_S = 0.4


@pytest.mark.parametrize(("overlapped", "replica", "name"), [(False, 0, "mine"), (True, 1, "mine-1")])
def test_vllm_joins_takes_the_table_and_reports(tmp_path, scheduler_for, overlapped, replica, name):
    config = fake_vllm.config(
        scheduler_config__async_scheduling=overlapped, parallel_config__data_parallel_index=replica
    )
    with controller(tmp_path, length=3) as there:
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


def test_when_the_controller_stops_its_last_table_stays(tmp_path, scheduler_for):
    with controller(tmp_path, length=1) as there:
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
    with controller(tmp_path, length=3) as there:
        for name in ("learn", "table_in_use"):  # each takes SLOW_S, in which the controller does nothing else
            act = getattr(there.service, name)
            setattr(there.service, name, lambda *given, act=act: time.sleep(SLOW_S) or act(*given))
        scheduler = joined(scheduler_for(SPECLEN_CONTROLLER=there.address))
        assert serve(scheduler, num_steps=60)[-1] == 3
        check_reported(scheduler)
        assert 1e-6 * scheduler.steering.cost.quantile(1.0) < SLOW_S / 2
        assert scheduler.steering.num_reported == 59


@pytest.mark.parametrize(("before", "after", "last"), [(5, 2, 2), (2, 7, 2)])
def test_vllm_starts_again_with_another_longest_length(tmp_path, scheduler_for, before, after, last):
    """The controller keeps running and has a table of the previous engine under the same worker's name."""
    with controller(tmp_path, length=5) as there:
        variables = {"SPECLEN_CONTROLLER": there.address, "SPECLEN_WORKER_WORKER_ID": "mine"}
        for longest in (before, after):
            config = fake_vllm.config(speculative_config__num_speculative_tokens=longest)
            config.speculative_config.num_speculative_tokens_per_batch_size = [(1, 8, longest)]
            scheduler = joined(scheduler_for(config, **variables))
            lengths = serve(scheduler, num_steps=60)
            check_reported(scheduler)
            scheduler.shutdown()
        assert (lengths[1], lengths[-1]) == (after, last)


def test_a_fixed_policy_is_kept_and_its_steps_are_reported(tmp_path, scheduler_for):
    with controller(tmp_path, length=1) as there:
        scheduler = joined(scheduler_for(SPECLEN_CONTROLLER=there.address, SPECLEN_WORKER_POLICY="fixed:4"))
        assert serve(scheduler)[1:] == [4] * 19
        check_reported(scheduler)


def asked_of(scheduler):
    """Batch sizes, and whether prefill comes along, for which the scheduler then asks for an arm."""
    control, asked = scheduler.steering.control, []
    choose = control.choose
    control.choose = lambda *given: asked.append(given) or choose(*given)
    return asked


def test_an_arm_is_asked_for_the_sequences_that_decode_next(scheduler_for):
    scheduler = scheduler_for(SPECLEN_CONTROLLER=UNREACHABLE)
    asked = asked_of(scheduler)
    serve(scheduler, num_steps=2, num_requests=1)
    scheduler.add("long", 100)  # its prompt takes two steps
    scheduler.schedule()
    assert asked == [(1, False), (1, False), (1, True)]


@pytest.mark.parametrize(
    ("num_slots", "admitted", "kept_waiting"),
    [(8, 1, True), (8, 0, False), (4, 1, False)],
    ids=["time", "memory", "slot"],
)
def test_only_requests_that_wait_for_time_keep_probes_waiting(scheduler_for, num_slots, admitted, kept_waiting):
    """Under saturation requests wait at every step, and no probe would ever begin."""
    config = fake_vllm.config(scheduler_config__max_num_seqs=num_slots)
    config.speculative_config.num_speculative_tokens_per_batch_size = [(1, num_slots, 5)]
    scheduler = scheduler_for(config, SPECLEN_CONTROLLER=UNREACHABLE)
    asked = asked_of(scheduler)
    serve(scheduler, num_steps=4, num_requests=3)
    assert asked == [(3, False)] * 4
    for name in ("next", "later"):
        scheduler.add(name, 10)
    scheduler.most_admitted = admitted
    scheduler.schedule()
    assert asked[-1][1] is kept_waiting


FULL_GRAPHS = {"use_v2_model_runner": True, "compilation_config__cudagraph_mode": "FULL_AND_PIECEWISE"}


def test_v2_only_uses_lengths_with_graphs(tmp_path, scheduler_for):
    with controller(tmp_path, length=3) as there:
        scheduler = joined(scheduler_for(fake_vllm.config(**FULL_GRAPHS), SPECLEN_CONTROLLER=there.address))
        assert {*serve(scheduler, num_steps=60)} == {5, 2}, "the configured one, then the nearest to 3"


PREPARED = {"additional_config": {"speclen": {"table": [[1, 8, 4]]}}}


@pytest.mark.parametrize(("replicas", "is_on"), [(1, True), (2, False)])
def test_the_users_table_is_the_fallback_of_the_captured_one(scheduler_for, replicas, is_on):
    """Replicas that step together in this process have none, as without the plugin."""
    config = fake_vllm.config(**FULL_GRAPHS, **PREPARED, parallel_config__data_parallel_size=replicas)
    scheduler = scheduler_for(config, SPECLEN_CONTROLLER=UNREACHABLE)
    assert scheduler.dynamic_sd_lookup == ([0, *[4] * 8] if is_on else None)
    assert (scheduler.steering is not None) is is_on
    if is_on:
        assert scheduler.steering.lengths.captured == {5, 2}


def test_connectors_see_the_chosen_length(scheduler_for):
    scheduler, seen = scheduler_for(SPECLEN_CONTROLLER=UNREACHABLE, SPECLEN_WORKER_POLICY="fixed:4"), []
    scheduler.connector = SimpleNamespace(
        build_connector_meta=lambda output: seen.append(output.num_spec_tokens_to_schedule)
    )
    serve(scheduler, num_steps=4)
    assert seen == [4] * 4
    assert scheduler.steering.num_reported == 3, "each step is taken once"


def test_engines_with_one_process_id_and_host_name_are_different_workers(scheduler_for, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    monkeypatch.setattr("os.getpid", lambda: 1)  # as in two containers
    ids = {scheduler_for(SPECLEN_CONTROLLER=UNREACHABLE).steering.control.card.worker_id for _ in range(2)}
    ids |= {
        scheduler_for(SPECLEN_CONTROLLER=UNREACHABLE, SPECLEN_WORKER_WORKER_ID="mine").steering.control.card.worker_id
        for _ in range(2)
    }
    assert len(ids) == 4
    assert {"mine", "mine.2"} < ids


def test_learned_lengths_are_read_at_the_next_start(tmp_path, scheduler_for):
    with controller(tmp_path, length=3) as there:
        scheduler = joined(scheduler_for(SPECLEN_CONTROLLER=there.address))
        serve(scheduler, num_steps=60)
        check_reported(scheduler)
        learned = startup.learned_by(fake_vllm.config())
        assert set(learned) <= {*range(1, 9)}
        assert learned[2], "two sequences were served"
        assert startup.learned_by(fake_vllm.config(model_config__enforce_eager=False)) == {}, "another context"


def test_without_an_address_an_embedded_controller_is_used_and_restarted(tmp_path, scheduler_for):
    scheduler = joined(scheduler_for(SPECLEN_DATA_DIR=str(tmp_path)))
    database, control = tmp_path / "speclen.db", scheduler.steering.control
    for _ in range(2):
        serve(scheduler)
        check_reported(scheduler)
        os.kill(serving(database).process_id, signal.SIGKILL)
        until(lambda: not control.connected)
        serve(scheduler)
        joined(scheduler)
    scheduler.shutdown()
    until(lambda: serving(database) is None)


def test_an_unusable_data_directory_is_one_warning_and_vllm_keeps_serving(tmp_path, scheduler_for, caplog):
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, logger=settings.LOGGER):
        scheduler = scheduler_for(SPECLEN_DATA_DIR=str(tmp_path / "file" / "directory"))
        until(lambda: logged(caplog))
        assert serve(scheduler)[1:] == [5] * 19
    [told] = logged(caplog)
    assert "name another directory with SPECLEN_DATA_DIR" in told.getMessage()


# What goes wrong.


def test_without_a_controller_the_configured_lengths_stay_and_one_line_is_logged(scheduler_for, caplog):
    with caplog.at_level(logging.INFO, logger=settings.LOGGER):
        scheduler = scheduler_for(SPECLEN_CONTROLLER=UNREACHABLE)
        assert serve(scheduler, num_requests=2)[1:] == [5] * 19
        assert serve(scheduler, num_requests=6)[1:] == [2] * 19
        until(lambda: "no controller yet" in caplog.text, what="told")
        time.sleep(1.5)  # two more attempts
    told = [record.getMessage() for record in logged(caplog) if record.levelno >= logging.WARNING]
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
    [told] = logged(caplog)
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
    assert [words in record.getMessage() for record in logged(caplog)].count(True) == 1


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
