"""Selects the length of every step of one scheduler. Reports are sent from a thread that vLLM never waits for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import grpc
import structlog

from speclen.integrations.vllm.engine import (
    check_config,
    choice_limits,
    configured_table,
    context_key,
    limits_of,
    remarks,
    traits_of,
)
from speclen.integrations.vllm.settings import CONFIGURED, VllmSettings, as_variables, settings_from
from speclen.integrations.vllm.startup import drafts_chosen
from speclen.integrations.vllm.steps import Request, Sampled, Scheduled, StepTracker
from speclen.integrations.vllm.timing import DeviceClock, device_clock
from speclen.process.embedded import EMBEDDED, EmbeddedController, FindController, at
from speclen.records import Arm, StepRecord
from speclen.worker.arms import ArmChoice, ArmTable
from speclen.worker.reporting.control_client import ControlClient
from speclen.worker.reporting.conversions import WorkerCard

log = structlog.get_logger()

# Steps of a probe. The first step at another length is not a usable sample: it verifies one length and drafts another.
PROBE_STEPS = 4
TRANSITION_STEPS = 2  # steps after a change of length that trials do not count
OVERLAPPED_PROBE_STEPS = 5  # if steps overlap without a device clock: the least number that gives one usable sample
RESTART_S = 5.0  # pause after a failure that the client does not handle itself
TELL_S = 60.0  # between two lines in the log
LAST_REPORTS_S = 2.0  # for the last reports to reach the disk at the end
NUM_COSTS = 10_000  # number of newest steps kept
MIN_SAMPLES = 20  # samples at or near a batch size before the controller's length is used there
NEAR = 2  # samples count at sizes within one in this many
FLAGGED = 0.3  # weight of a flagged step: if requests arrive all the time, most steps include prefill

# vLLM's scheduler. Used attributes: vllm_config, num_spec_tokens, dynamic_sd_lookup, connector and ec_connector.
Engine: TypeAlias = Any


class Reporting:
    """Runs a control client on an event loop of its own, from start to stop."""

    def __init__(
        self,
        control: ControlClient,
        controller: str,
        credentials: grpc.ChannelCredentials | None,
        metadata: Sequence[tuple[str, str | bytes]],
    ) -> None:
        self.control = control
        self._controller, self._security = controller, (credentials, metadata)
        self.tell: Callable[[], None] = lambda: None  # called periodically
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="speclen-reporting", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Wait briefly for the last reports to be sent, then end the thread."""
        deadline = time.monotonic() + LAST_REPORTS_S
        while self.control.connected and self.control.buffer and time.monotonic() < deadline:
            time.sleep(0.02)
        self.abandon()
        self._thread.join(LAST_REPORTS_S)

    def abandon(self) -> None:
        """Let the thread end without waiting for it or for the last reports."""
        self._stopping.set()

    def _run(self) -> None:
        with contextlib.closing(EmbeddedController()) as embedded:
            find = embedded.address if self._controller == EMBEDDED else at(self._controller)
            while not self._stopping.is_set():
                try:
                    asyncio.run(self._until_stopped(find))
                except Exception:
                    log.exception("reporting to the controller failed, and starts again", after_s=RESTART_S)
                    self._stopping.wait(RESTART_S)

    async def _until_stopped(self, find: FindController) -> None:
        client = asyncio.create_task(self.control.run(find, *self._security))
        told = time.monotonic()
        while not self._stopping.is_set() and not client.done():
            await asyncio.sleep(0.1)
            if time.monotonic() - told >= TELL_S:
                told = time.monotonic()
                self.tell()
        client.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await client


class CautiousLengths:
    """Replaces a controller's lengths at batch sizes without evidence, and lengths that cannot or should not be used.

    configured: lengths that vLLM itself would use. captured: lengths with full graphs, for steps of up to max_captured
    tokens; empty if no length has an advantage. least: the smallest length to use.
    """

    def __init__(
        self, configured: ArmTable, captured: Set[int] = frozenset(), max_captured: int = 0, least: int = 0
    ) -> None:
        self.configured, self.captured, self.max_captured, self.least = configured, captured, max_captured, least
        self._own = [0.0] * len(configured.arms)  # samples by batch size
        self._samples = self._own.copy()  # including those of neighbours

    def note(self, step: StepRecord) -> None:
        """Count a reported step for its batch size and its neighbours, until its own has enough for all of them."""
        own = min(step.batch_size, len(self._own) - 1)
        if self._own[own] >= MIN_SAMPLES:
            return
        weight, reach = FLAGGED if step.flags else 1.0, max(1, own // NEAR)
        self._own[own] += weight
        for size in range(max(1, own - reach), min(own + reach, len(self._samples) - 1) + 1):
            self._samples[size] += weight

    def choice(self, batch_size: int, wanted: ArmChoice, table: ArmTable) -> ArmChoice:
        """The choice to use instead of the controller's. Probes are always followed, since evidence begins with them.

        table: the controller's, used for a probe of a length that cannot run: another length must not count as that probe.
        """
        length = wanted.arm.speculation_length
        if wanted.probe_id:
            if self._may_choose(length, batch_size):
                return wanted
            wanted = ArmChoice(table.arms[batch_size], table.version)
            length = wanted.arm.speculation_length
        if self._samples[batch_size] < MIN_SAMPLES:
            return ArmChoice(self.configured.arms[batch_size])
        if self._may_choose(length, batch_size):
            return wanted
        lengths = [each for each in self.captured if each >= self.least] or [self.least]
        return wanted._replace(arm=Arm(min(lengths, key=lambda each: (abs(each - length), each))))

    def _may_choose(self, length: int, batch_size: int) -> bool:
        is_fast = not self.captured or length in self.captured or batch_size * (1 + length) > self.max_captured
        return is_fast and length >= self.least


class Cost:
    """Seconds that choosing and reporting take per step. Written by the engine's thread, read by any thread."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=NUM_COSTS)
        self.add = self._newest.append

    def quantile(self, share: float) -> int:
        """Quantile of the cost in microseconds; 0 without steps."""
        costs = sorted(self._newest.copy())
        return round(1e6 * costs[min(int(share * len(costs)), len(costs) - 1)]) if costs else 0


class Steering:
    """Lengths of one scheduler. Its methods are called from the engine's thread and never block."""

    def __init__(
        self, control: ControlClient, tracker: StepTracker, lengths: CautiousLengths, reporting: Reporting
    ) -> None:
        self.control = control
        self.tracker = tracker
        self.lengths = lengths
        self.reporting = reporting
        self.num_reported = 0
        self.cost = Cost()
        self._so_far_s = 0.0  # of steps in flight

    def scheduled(self, output: Scheduled, requests: Mapping[str, Request], waiting: bool, started: float) -> None:
        """Set how many tokens the step drafts, by the number of sequences that decode in the next step.

        waiting: True if requests wait while a slot is free. If the step has no prefill, they wait for KV memory or because
        of a pause. That may last, so they do not delay probes.
        """
        begin = time.perf_counter()
        step = self.tracker.scheduled(output, requests, started)
        if step is None:
            return
        rows = min(max(step.num_next, 1), self.control.card.limits.max_batch_size)
        is_next = waiting and step.shape.with_prefill
        with_prefill = is_next or step.num_next < len(output.num_scheduled_tokens)
        choice = self.lengths.choice(rows, self.control.choose(rows, with_prefill), self.control.table)
        self.tracker.drafts(step, choice)
        output.num_spec_tokens_to_schedule = choice.arm.speculation_length
        self._so_far_s += time.perf_counter() - begin

    def arrived(self, output: Scheduled, requests: Mapping[str, Request], ended: float) -> None:
        """Note that the result of a step arrived at time `ended`. Called before vLLM processes it."""
        begin = time.perf_counter()
        self.tracker.arrived(output, requests, ended)
        self._so_far_s += time.perf_counter() - begin

    def finished(self, sampled: Sampled, busy: bool) -> None:
        """Report the step that arrived. busy: True if requests remain."""
        begin = time.perf_counter()
        found = self.tracker.finished(sampled, busy)
        if found is not None:
            self.lengths.note(found)
            self.control.report(found)
            self.num_reported += 1
        self.cost.add(self._so_far_s + time.perf_counter() - begin)
        self._so_far_s = 0.0

    def stop(self) -> None:
        """End reporting, and log its totals."""
        self.reporting.stop()
        self.tell()

    def abandon(self) -> None:
        """End reporting without waiting: a worker that no longer reports must not look alive to the controller."""
        self.reporting.abandon()

    def tell(self) -> None:
        """Log how much was reported, and what it cost."""
        log.info(
            "steps reported",
            steps=self.num_reported,
            left_out=self.tracker.num_odd,
            median_us=self.cost.quantile(0.5),
            p99_us=self.cost.quantile(0.99),
        )


def steering_for(
    engine: Engine,
    environment: Mapping[str, str],
    platform: Any,
    version: str,
    name_of: Callable[[str], str],
    captured: Set[int],
) -> Steering:
    """Create the steering and start its reports. Raises ValueError with one sentence that names the variables.

    name_of: the worker's id, given the user's. captured: lengths that vLLM captures graphs for.
    """
    config = engine.vllm_config
    try:
        settings = settings_from(environment)
        check_config(config)
        if engine.dynamic_sd_lookup is None:
            length, rows = config.speculative_config.num_speculative_tokens, config.scheduler_config.max_num_seqs
            raise ValueError(
                "num_speculative_tokens_per_batch_size is not in use: vLLM's log says why it was dropped, or, if "
                f'VLLM_PLUGINS is set, name speclen there or add "num_speculative_tokens_per_batch_size": '
                f"[[1, {rows}, {length}]] to --speculative-config"
            )
        clock = device_clock(config, platform)
        control = control_for(engine, settings, platform, version, name_of(settings.worker_id), clock)
        credentials, metadata = settings.security.credentials(), settings.security.metadata()
    except ValueError as error:
        raise ValueError(as_variables(str(error))) from error
    reporting = Reporting(control, settings.controller, credentials, metadata)
    keeps_ended = engine.connector is not None or engine.ec_connector is not None
    tracker = StepTracker(traits_of(config, keeps_ended), ArmChoice(Arm(engine.num_spec_tokens)), clock)
    # A policy set by the user is followed exactly.
    limits = choice_limits(config, captured) if control.follow else {}
    steering = Steering(control, tracker, CautiousLengths(control.table, **limits), reporting)
    reporting.tell = steering.tell
    reporting.start()
    log.info(
        "lengths come from the controller",
        controller=settings.controller,
        worker=control.card.worker_id,
        policy=settings.policy,
        times="the device's" if clock else "between results",
        engine=control.card.context.engine_fingerprint,
    )
    for sentence in remarks(config, captured, engine.dynamic_sd_lookup, drafts_chosen(config)):
        log.info(sentence)
    return steering


def control_for(
    engine: Engine, settings: VllmSettings, platform: Any, version: str, worker_id: str, clock: DeviceClock | None
) -> ControlClient:
    """The control client with the engine's name, context and first table. Raises ValueError."""
    overlapped = engine.vllm_config.scheduler_config.async_scheduling
    limits = limits_of(engine.dynamic_sd_lookup, engine.num_spec_tokens)
    table = configured_table(engine.dynamic_sd_lookup, settings.policy, limits)
    card = WorkerCard(
        worker_id=worker_id,
        epoch=time.time_ns(),
        context=context_key(engine.vllm_config, settings, platform, version),
        limits=limits,
        address="",  # unknown here: vLLM does not give the engine its address
        policy=settings.policy,
        run_id=settings.run_id,
        probe_steps=OVERLAPPED_PROBE_STEPS if overlapped and clock is None else PROBE_STEPS,
        evaluates=False,
        transition_steps=TRANSITION_STEPS,
        baseline=table.choices if settings.baseline == CONFIGURED and settings.follows_table else (),
    )
    return ControlClient(card, table, settings.follows_table)
