"""One worker process, from its settings to its drain: models, engine thread, control client, gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from typing import Any

import structlog
import torch
from grpc import aio
from prometheus_client import CollectorRegistry

from speclen.process.credentials import ServerSecurity
from speclen.process.health import NOT_SERVING, SERVING, Health
from speclen.process.servers import SERVER_OPTIONS, create_server, probed, set_health
from speclen.process.settings import installed_version
from speclen.process.supervision import PartFailedError, Supervisor, stop_event
from speclen.records import PLAIN, Arm, Limits
from speclen.v1 import control_pb2, generation_pb2, generation_pb2_grpc
from speclen.worker.arms import DEFAULT_ARM, ArmTable
from speclen.worker.backends import openvino
from speclen.worker.backends.threads import ThreadChoice, set_threads, watch_cores
from speclen.worker.config import WorkerConfig, parse_policy
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.engine.inbox import EngineThread
from speclen.worker.engine.preparation import PreparedPair, prepare
from speclen.worker.engine.step_runner import SLOW_STEPS
from speclen.worker.frontend.admission import Admission
from speclen.worker.frontend.async_engine import FAILURE_GRACE_S, AsyncEngine
from speclen.worker.frontend.generation_servicer import GenerationServicer
from speclen.worker.frontend.worker_metrics import RequestMetrics, WorkerMetrics, page_of
from speclen.worker.models.devices import resolve_device, resolve_dtype
from speclen.worker.models.loading import ModelPair, load_pair
from speclen.worker.models.machine import device_name
from speclen.worker.models.naming import digest, model_label
from speclen.worker.profiling.file import foreign_parts, table_from_file
from speclen.worker.reporting.control_client import ControlClient
from speclen.worker.reporting.control_stream import finder
from speclen.worker.reporting.conversions import WorkerCard
from speclen.worker.requests.request import EngineFailedError, SamplingParams, check_sampling

log = structlog.get_logger()

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
OPTIONS = [
    *SERVER_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
STREAM_INTERVAL_S = 0.02  # outputs of a stream are gathered for this long
# Between any two operators the engine's thread must get the interpreter back. At the default of 5 ms it could wait for the
# event loop longer than a step takes.
SWITCH_INTERVAL_S = 0.0005
ENGINE = "the engine"
FRONT = "the HTTP front"
STOP_TIMEOUT_S = 5.0  # for the engine's running step to end
FLUSH_TIMEOUT_S = 2.0  # for the controller to acknowledge the last reports
# Opens another front, such as HTTP, while a block runs, given settings, engine, metrics page and a callback for failures.
# Yields one line about it for the user, or "".
OpenFront = Callable[
    [WorkerConfig, AsyncEngine, CollectorRegistry, Callable[[BaseException], None]],
    contextlib.AbstractAsyncContextManager[str],
]


def initial_table(config: WorkerConfig, limits: Limits) -> tuple[ArmTable, bool]:
    """The table with which a worker starts, and True if it then follows the controller's.

    Raises ValueError if the profile cannot be read.
    """
    arm, follow = parse_policy(config.policy), config.follows_table
    if config.policy == "shadow":
        return baseline_table(config, limits), True
    if follow and config.ngram and not config.has_draft:
        arm = Arm(0, ngram=True)
    if arm is not None:
        return ArmTable.constant(arm, limits, "policy"), follow
    if config.profile is not None:
        return table_from_file(config.profile, limits), follow
    return ArmTable.constant(DEFAULT_ARM, limits, "default"), True


def baseline_table(config: WorkerConfig, limits: Limits) -> ArmTable:
    """The arms that the worker would use without learning. Raises ValueError if the profile cannot be read."""
    if config.baseline == "profile" and config.profile is not None:
        return table_from_file(config.profile, limits)
    return ArmTable.constant(parse_policy(config.baseline, "--baseline") or PLAIN, limits, "policy")


def make_control(config: WorkerConfig, pair: ModelPair, prepared: PreparedPair | Engine) -> ControlClient:
    """Make the control client, with the worker's name, context and first table."""
    table, follow = initial_table(config, prepared.limits)
    context = context_key(pair, prepared.backend)
    if config.profile is not None and (different := foreign_parts(config.profile, context)):
        # It is used nevertheless: it was named on purpose, and a controller corrects it.
        log.warning("the profile was measured elsewhere", profile=str(config.profile), different="; ".join(different))
    card = WorkerCard(
        worker_id=config.worker_id or f"{socket.gethostname()}:{config.listen.rpartition(':')[2]}",
        epoch=time.time_ns(),
        context=context,
        limits=prepared.limits,
        address=config.listen,
        policy=config.policy,
        run_id=config.run_id,
        probe_steps=SLOW_STEPS + 4 if prepared.target.slow_changes else 3,
        baseline=() if config.baseline == "off" else baseline_table(config, prepared.limits).choices,
    )
    return ControlClient(card, table, follow)


def model_facts(
    pair: ModelPair, engine: Engine, context: control_pb2.ContextKey
) -> generation_pb2.GetModelInfoResponse:
    """The answer of GetModelInfo."""
    return generation_pb2.GetModelInfoResponse(
        context=context,
        target_path=pair.target_name,
        draft_path=pair.draft_name,
        vocab_size=pair.vocab_size,
        max_context_length=engine.max_context_length,
        eos_token_ids=pair.eos_token_ids,
        num_target_parameters=num_parameters(pair.target),
        num_draft_parameters=num_parameters(pair.draft),
    )


def num_parameters(model: torch.nn.Module | None) -> int:
    return 0 if model is None else sum(parameter.numel() for parameter in model.parameters())


def load(config: WorkerConfig, progress: Callable[[str], None]) -> tuple[ModelPair, Engine, ControlClient]:
    """Load the models, and make engine and control client. Raises ValueError with one sentence if settings are bad."""
    drafting = config.draft if config.has_draft else "no draft model: only n-grams are proposed (--draft names one)"
    progress(f"loading {config.target} and {drafting}")
    pair = load_pair(config.target, config.draft if config.has_draft else None, config.device, config.dtype)
    pair.sampling_defaults = {} if config.generation_config == "none" else usable_defaults(pair.sampling_defaults)
    if pair.sampling_defaults:
        listed = ", ".join(f"{name} {value:g}" for name, value in pair.sampling_defaults.items())
        progress(f"defaults of requests, from generation_config.json: {listed}")
    set_threads(config.threads, pair)
    engine_config = EngineConfig(
        max_batch_size=config.max_batch_size,
        max_speculation_length=config.max_length if pair.draft is not None else 0,
        ngram=config.may_use_ngrams,
        max_kv_tokens=config.max_kv_tokens or None,
        max_cached_tokens=config.max_cached_tokens,
        backend=config.backend,
    )
    prepared = prepare(pair, engine_config)
    progress(f"{prepared.backend} runs the models")
    control = make_control(config, pair, prepared)
    engine = Engine(pair, engine_config, control, prepared)
    if pair.device.type == "cpu" and not config.threads and engine.num_threads > 1:
        # Otherwise, on a busy machine, the first request would wait seconds for the change to one thread fewer.
        prepare_threads(engine, engine.num_threads - 1)
    return pair, engine, control


def usable_defaults(found: dict[str, Any]) -> dict[str, float]:
    """The sampling defaults that are valid for a request. Others are ignored with a warning."""
    usable = {}
    for name, value in found.items():
        try:
            check_sampling(SamplingParams(**{name: value}), 0)
            usable[name] = value
        except (ValueError, TypeError) as error:
            log.warning("a value of generation_config.json is ignored", name=name, reason=str(error))
    return usable


def prepare_threads(engine: Engine, num_threads: int) -> None:
    """Compile the models for a number of CPU threads, so that a later change to it delays no step."""
    for model in (engine.target, engine.draft):
        if model is None:
            continue
        try:
            model.use_threads(num_threads)
        except MemoryError as error:
            log.info(
                "models are not compiled for another number of threads", num_threads=num_threads, reason=str(error)
            )
        finally:
            model.use_threads(engine.num_threads)


def model_name(name: str, model: torch.nn.Module | None) -> str:
    """Label of a model; "none" if there is no model."""
    return "none" if model is None else model_label(name, model.config.to_dict())  # type: ignore[union-attr, operator]


def context_key(pair: ModelPair, backend: str) -> control_pb2.ContextKey:
    """The context of this worker's step times. backend: name and version."""
    others = " ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    versions = f"speclen {installed_version()} {others}"
    engine = f"{versions} {backend} threads {torch.get_num_threads()}"
    return control_pb2.ContextKey(
        target=model_name(pair.target_name, pair.target),
        draft=model_name(pair.draft_name, pair.draft),
        device=device_name(pair.device),
        dtype=str(pair.dtype).removeprefix("torch."),
        engine_fingerprint=f"{backend.partition(' ')[0]},threads={torch.get_num_threads()},{digest(engine)}",
    )


async def open_service(
    address: str, servicer: GenerationServicer, security: ServerSecurity
) -> tuple[aio.Server, int, Health]:
    """Create the server of the Generate service. Returns it with its port and health. Raises as `create_server`."""
    add = functools.partial(generation_pb2_grpc.add_GenerationServiceServicer_to_server, servicer)
    return await create_server(address, SERVICE, add, security, OPTIONS)


async def serve(
    config: WorkerConfig,
    progress: Callable[[str], None],
    open_front: OpenFront = lambda *_: contextlib.nullcontext(""),
) -> None:
    """Run a worker until SIGTERM or SIGINT, then let running requests finish.

    Raises ValueError or OSError with one sentence if settings cannot work, PartFailedError if it can no longer serve.
    """
    check_config(config)
    controller = config.controller_security()
    credentials, metadata = controller.credentials(), controller.metadata()
    parts = await make_parts(config, progress)
    engine, control, supervisor = parts.engine, parts.control, parts.supervisor
    find = finder(config.controller, control.card.context)
    server, port, health_servicer = await open_service(config.listen, parts.servicer, config)
    # The HTTP front ends last, so that its callers get the reason.
    async with (
        probed(config.probe_listen, health_servicer),
        open_front(config, engine, parts.page, functools.partial(supervisor.fail, FRONT)) as front,
    ):
        running = start_engine(config, parts)
        await server.start()
        stopping = stop_event()
        reporting = functools.partial(control.run, find, credentials, metadata) if find else control.keep_bounded
        supervisor.keep("reporting", reporting)
        supervisor.watch_loop()
        await set_health(health_servicer, SERVICE, SERVING)
        progress(f"worker serving on {config.listen.rpartition(':')[0]}:{port}")
        if front:
            progress(front)
        async with ending(server, health_servicer, engine, supervisor):
            await supervisor.wait(stopping)
            progress("draining: running requests finish, new ones are refused")
            await set_health(health_servicer, SERVICE, NOT_SERVING)
            await drain(engine, control, config.drain_timeout_s, supervisor.check)
    await wait_until_stopped(running)


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a worker, on one event loop. page: registry of the metrics. thread: where the engine will run."""

    engine: AsyncEngine
    control: ControlClient
    servicer: GenerationServicer
    page: CollectorRegistry
    supervisor: Supervisor
    thread: EngineThread


async def make_parts(config: WorkerConfig, progress: Callable[[str], None]) -> Parts:
    """Load the models, and serve the metrics page if configured. Raises ValueError with one sentence if settings are bad."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    supervisor, thread = Supervisor(), EngineThread()
    thread.start()
    pair, engine, control = await asyncio.wrap_future(thread.call(load, config, progress))
    num_rows = engine.limits.max_batch_size
    admission = Admission(pair, engine.max_context_length, num_rows, config.max_waiting, config.max_queue_s)
    metrics = WorkerMetrics(engine, control, supervisor.num_failures, lambda: admission.num_waiting)
    requests = RequestMetrics(metrics)
    page = page_of(metrics.registry, config.served_model_name or config.target)
    if config.metrics_listen:
        metrics.serve(config.metrics_listen, config, page)
        supervisor.keep("metrics", functools.partial(metrics.keep_page, config.metrics_listen, config, page))
    async_engine = AsyncEngine(engine, admission, requests, STREAM_INTERVAL_S, config.unread_timeout_s)
    facts = model_facts(pair, engine, control.card.context)
    servicer = GenerationServicer(async_engine, control, facts, config.keyring())
    return Parts(async_engine, control, servicer, page, supervisor, thread)


@contextlib.asynccontextmanager
async def ending(
    server: aio.Server,
    health_servicer: Health,
    async_engine: AsyncEngine,
    supervisor: Supervisor,
) -> AsyncIterator[None]:
    """End everything after the block. After a PartFailedError, requests end at once with that error."""
    grace_s = 1.0
    try:
        yield
    except PartFailedError as error:
        log.critical("the worker can no longer serve and ends", reason=str(error))
        grace_s = FAILURE_GRACE_S
        await set_health(health_servicer, SERVICE, NOT_SERVING)
        async_engine.fail(EngineFailedError(f"{error}; the worker ends"))
        raise
    finally:
        async_engine.stop()
        await server.stop(grace_s)
        await supervisor.stop()
        await asyncio.to_thread(async_engine.admission.close)  # waits for a running trial of a grammar


def check_config(config: WorkerConfig) -> None:
    """Raise ValueError if settings cannot work on this machine, OSError if a port is taken."""
    config.check_listening()
    device = resolve_device(config.device)
    if config.backend == "openvino":
        reason = openvino.why_not(device, resolve_dtype(config.dtype, device, num_parameters=0))
        if reason is not None:
            raise ValueError(f"--backend openvino: {reason}")


def start_engine(config: WorkerConfig, parts: Parts) -> asyncio.Future[None]:
    """Start the engine in its thread. If it ends for any reason, the worker ends.

    On a CPU it uses fewer threads while other processes need the cores, unless --threads is given.
    """
    engine, supervisor = parts.engine.engine, parts.supervisor
    running = asyncio.wrap_future(parts.thread.call(engine.run))

    def ended(future: asyncio.Future[None]) -> None:
        if not future.cancelled():
            supervisor.fail(ENGINE, future.exception() or RuntimeError("its loop returned"))

    running.add_done_callback(ended)
    if engine.pair.device.type == "cpu" and not config.threads and engine.num_threads > 1:
        choice = ThreadChoice(engine.num_threads)
        supervisor.keep("thread watching", functools.partial(watch_cores, choice, engine.use_threads))
    return running


async def wait_until_stopped(running: asyncio.Future[None]) -> None:
    """Wait for the engine. Raises PartFailedError if its running step does not end."""
    if not (await asyncio.wait([running], timeout=STOP_TIMEOUT_S))[0]:
        error = f"{ENGINE} has not stopped within {STOP_TIMEOUT_S:g} s"
        log.critical("the worker ends without its engine", reason=error)
        raise PartFailedError(error)


async def drain(engine: AsyncEngine, control: ControlClient, timeout_s: float, check: Callable[[], None]) -> None:
    """Refuse new requests, let running ones finish, and send the last reports.

    check: called while requests run; raises an error if waiting is useless.
    """
    engine.drain()
    deadline = time.monotonic() + timeout_s
    while engine.num_open:
        check()
        if time.monotonic() >= deadline:
            log.warning("the drain timed out: running requests are ended", num_running=engine.num_open)
            break
        await asyncio.sleep(0.05)
    control.send_last()
    deadline = time.monotonic() + FLUSH_TIMEOUT_S
    while control.connected and control.buffer and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
