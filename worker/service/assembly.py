"""What a worker is made of: models, engine, first table and control client."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace

import structlog
import torch

from speclen.worker.backends.threads import set_threads
from speclen.worker.config import WorkerConfig, parse_policy
from speclen.worker.drafting.plan import COPYING
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.engine.preparation import prepare
from speclen.worker.models.loading import ModelPair, load_pair
from speclen.worker.profiling.file import foreign_parts, table_from_file
from speclen.worker.reporting.control_client import ControlClient, WorkerCard
from speclen.worker.reporting.identity import context_key
from speclen.worker.reporting.length_table import DEFAULT_LENGTH, BucketLength, LengthTable
from speclen.worker.service.servicer import ModelFacts

log = structlog.get_logger()


def initial_table(config: WorkerConfig, max_length: int) -> tuple[LengthTable, bool]:
    """The table a worker starts with, and whether it follows the controller's.

    Raises ValueError for a policy that is unknown or asks for a length over the limit.
    """
    kind, length = parse_policy(config.policy)
    if planned := config.planned():
        buckets = [BucketLength(one.batch_min, one.batch_max, one.plan.draft_length, one.plan) for one in planned]
        table = LengthTable.from_buckets(buckets, config.max_batch_size, max_length, 0, "policy", max_copied(config))
        return table, kind == "adaptive" and not config.plan
    if kind == "fixed":
        assert length is not None
        if length > max_length:
            raise ValueError(f"--policy fixed:{length} is over --max-length {max_length}")
        return LengthTable.constant(length, config.max_batch_size, "policy"), False
    if kind == "none":
        return LengthTable.constant(0, config.max_batch_size, "policy"), False
    if config.profile is not None:
        return table_from_file(config.profile, config.max_batch_size, max_length), kind == "adaptive"
    if kind == "profile":
        raise ValueError("--policy profile needs --profile FILE: make one with `speclen profile run`")
    return LengthTable.constant(min(DEFAULT_LENGTH, max_length), config.max_batch_size, "default"), True


def max_copied(config: WorkerConfig) -> int:
    """Tokens that rows may copy in one step: as many as the flags' plans say, or as a controller may plan."""
    if config.policy == "adaptive" and not config.plan:
        return config.max_copied_tokens
    return max((bucket.plan.copy_max_tokens for bucket in config.planned()), default=0)


def make_control(config: WorkerConfig, pair: ModelPair, backend: str) -> ControlClient:
    """The control client with the worker's name, context and first table."""
    max_length = config.max_length if pair.draft is not None else 0
    table, follow = initial_table(config, max_length)
    context = context_key(pair, backend)
    if config.profile is not None and (different := foreign_parts(config.profile, context)):
        # Used all the same: it was named on purpose, and a controller corrects it. But not in silence.
        log.warning("the profile was measured elsewhere", profile=str(config.profile), different="; ".join(different))
    card = WorkerCard(
        worker_id=config.worker_id or f"{socket.gethostname()}:{config.listen.rpartition(':')[2]}",
        epoch=time.time_ns(),
        context=context,
        max_batch_size=config.max_batch_size,
        max_speculation_length=max_length,
        address=config.listen,
        policy="plan" if config.plan else config.policy,
        run_id=config.run_id,
        max_copied_tokens=max_copied(config),
    )
    without_draft = None if config.has_draft else COPYING.within(0, max_copied(config))
    return ControlClient(card, table, follow, without_draft=without_draft)


def model_facts(pair: ModelPair, control: ControlClient) -> ModelFacts:
    return ModelFacts(
        context=control.card.context,
        target_path=pair.target_name,
        draft_path=pair.draft_name,
        num_target_parameters=num_parameters(pair.target),
        num_draft_parameters=num_parameters(pair.draft) if pair.draft is not None else 0,
    )


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def load(config: WorkerConfig, progress: Callable[[str], None]) -> tuple[ModelPair, Engine, ControlClient]:
    """Models, engine and control client, ready to run. Raises ValueError with one sentence for bad settings."""
    parse_policy(config.policy)
    drafting = (
        config.draft if config.has_draft else "no draft model: rows only copy from their own text (--draft names one)"
    )
    progress(f"loading {config.target} and {drafting}")
    pair = load_pair(
        config.target, config.draft if config.has_draft else None, config.device, config.dtype, config.weights
    )
    set_threads(config.threads, pair)
    engine_config = EngineConfig(
        max_batch_size=config.max_batch_size,
        max_speculation_length=config.max_length if pair.draft is not None else 0,
        max_copied_tokens=max_copied(config),
        max_shared_tokens=config.max_shared_tokens,
        max_kv_tokens=config.max_kv_tokens or None,
        max_cached_tokens=config.max_cached_tokens,
        backend=config.backend,
    )
    prepared = prepare(pair, engine_config)
    progress(f"{prepared.backend} runs the models")
    control = make_control(config, pair, prepared.backend)
    engine = Engine(pair, engine_config, control, prepared)
    control.card = card_of(control.card, engine)
    return pair, engine, control


def card_of(card: WorkerCard, engine: Engine) -> WorkerCard:
    """What the worker says of itself, with what is known of its engine: fewer rows may fit than were asked for."""
    probe_steps = 2 if engine.target.slow_changes else 1
    return replace(card, max_batch_size=engine.max_batch_size, probe_steps=probe_steps)
