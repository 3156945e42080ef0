"""Parts of a worker: models, engine, first table and control client."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import structlog
import torch

from speclen.records import PLAIN, Arm, Limits
from speclen.v1 import control_pb2, generation_pb2
from speclen.worker.backends.threads import set_threads
from speclen.worker.config import WorkerConfig, parse_policy
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.engine.preparation import PreparedPair, prepare
from speclen.worker.engine.step_runner import SLOW_STEPS
from speclen.worker.models.loading import ModelPair, load_pair
from speclen.worker.profiling.file import foreign_parts, table_from_file
from speclen.worker.reporting.card import WorkerCard
from speclen.worker.reporting.control_client import ControlClient
from speclen.worker.reporting.identity import context_key
from speclen.worker.reporting.table import DEFAULT_ARM, ArmTable
from speclen.worker.requests.request import SamplingParams
from speclen.worker.requests.validation import check_sampling

log = structlog.get_logger()


def initial_table(config: WorkerConfig, limits: Limits) -> tuple[ArmTable, bool]:
    """The table a worker starts with, and True if it follows the controller's. Raises ValueError for no profile."""
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
    """The arms that the worker would use without learning. Raises ValueError for no profile."""
    if config.baseline == "profile" and config.profile is not None:
        return table_from_file(config.profile, limits)
    return ArmTable.constant(parse_policy(config.baseline, "--baseline") or PLAIN, limits, "policy")


def make_control(config: WorkerConfig, pair: ModelPair, prepared: PreparedPair | Engine) -> ControlClient:
    """The control client with the worker's name, context and first table."""
    table, follow = initial_table(config, prepared.limits)
    context = context_key(pair, prepared.backend)
    if config.profile is not None and (different := foreign_parts(config.profile, context)):
        # Used all the same, with a warning: it was named on purpose, and a controller corrects it.
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
    """Models, engine and control client, ready to run. Raises ValueError with one sentence for bad settings."""
    drafting = config.draft if config.has_draft else "no draft model: only n-grams are proposed (--draft names one)"
    progress(f"loading {config.target} and {drafting}")
    pair = load_pair(config.target, config.draft if config.has_draft else None, config.device, config.dtype)
    pair.sampling_defaults = {} if config.generation_config == "none" else usable_defaults(pair.sampling_defaults)
    if pair.sampling_defaults:
        shown = ", ".join(f"{name} {value:g}" for name, value in pair.sampling_defaults.items())
        progress(f"requests sample by generation_config.json unless they say otherwise: {shown}")
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
        # Else the first request on a busy machine, with one thread fewer, waits for seconds.
        prepare_threads(engine, engine.num_threads - 1)
    return pair, engine, control


def usable_defaults(found: dict[str, Any]) -> dict[str, float]:
    """Sampling defaults that a request may have; others are left out, with a warning."""
    usable = {}
    for name, value in found.items():
        try:
            check_sampling(SamplingParams(**{name: value}), 0)
            usable[name] = value
        except (ValueError, TypeError) as error:
            log.warning("a value of generation_config.json is not used", name=name, reason=str(error))
    return usable


def prepare_threads(engine: Engine, num_threads: int) -> None:
    """Compile for that many CPU threads, so that a later change delays no step."""
    for model in (engine.target, engine.draft):
        if model is None:
            continue
        try:
            model.use_threads(num_threads)
        except MemoryError as error:
            log.info("models are not compiled for more threads", num_threads=num_threads, reason=str(error))
        finally:
            model.use_threads(engine.num_threads)
