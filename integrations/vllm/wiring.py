"""Puts an engine's steering together from vLLM's configuration and the environment."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypeAlias

import structlog

from speclen.integrations.vllm.background import Reporting
from speclen.integrations.vllm.context import (
    check_config,
    configured_table,
    context_key,
    fast_lengths,
    limits_of,
    traits_of,
)
from speclen.integrations.vllm.device_clock import DeviceClock, device_clock
from speclen.integrations.vllm.lengths import CautiousLengths
from speclen.integrations.vllm.replicas import worker_name
from speclen.integrations.vllm.settings import VllmSettings, as_variables, settings_from
from speclen.integrations.vllm.steering import Steering
from speclen.integrations.vllm.steps import StepTracker
from speclen.integrations.vllm.v2_runner import remark
from speclen.records import Arm
from speclen.worker.drafting.arm_chooser import ArmChoice
from speclen.worker.reporting.card import WorkerCard
from speclen.worker.reporting.control_client import ControlClient

log = structlog.get_logger()

# Choices of a probe. The first step of another length is no usable sample of time: it verifies one and drafts another.
PROBE_STEPS = 4
# Where steps overlap and the device has no clock to read: the least that gives one usable sample.
OVERLAPPED_PROBE_STEPS = 5


# vLLM's scheduler, of which vllm_config, num_spec_tokens and dynamic_sd_lookup are looked at.
Engine: TypeAlias = Any


def steering_for(
    engine: Engine, environment: Mapping[str, str], platform: Any, version: str, worker_id: str
) -> Steering:
    """Steering that reports already. Raises ValueError with one sentence, naming variables, for what cannot work."""
    try:
        settings = settings_from(environment)
        check_config(engine.vllm_config)
        clock = device_clock(engine.vllm_config, platform)
        control = control_for(engine, settings, platform, version, worker_id, clock)
        credentials, metadata = settings.security.credentials(), settings.security.metadata()
    except ValueError as error:
        raise ValueError(as_variables(str(error))) from error
    reporting = Reporting(control, settings.controller, credentials, metadata)
    tracker = StepTracker(traits_of(engine.vllm_config), ArmChoice(Arm(engine.num_spec_tokens)), clock)
    steering = Steering(control, tracker, cautious_lengths(engine, control), reporting)
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
    if sentence := remark(engine.vllm_config):
        log.info(sentence)
    return steering


def control_for(
    engine: Engine, settings: VllmSettings, platform: Any, version: str, worker_id: str, clock: DeviceClock | None
) -> ControlClient:
    """The control client with the engine's name, context and first table. Raises ValueError."""
    assert engine.dynamic_sd_lookup is not None, "check_config has seen it"
    overlapped = engine.vllm_config.scheduler_config.async_scheduling
    limits = limits_of(engine.dynamic_sd_lookup, engine.num_spec_tokens)
    table = configured_table(engine.dynamic_sd_lookup, settings.policy, limits)
    card = WorkerCard(
        worker_id=worker_name(settings.worker_id or worker_id, engine.vllm_config.parallel_config),
        epoch=time.time_ns(),
        context=context_key(engine.vllm_config, settings, platform, version),
        limits=limits,
        address="",  # vLLM's own, which its engine is not told
        policy=settings.policy,
        run_id=settings.run_id,
        probe_steps=OVERLAPPED_PROBE_STEPS if overlapped and clock is None else PROBE_STEPS,
        evaluates=False,
    )
    return ControlClient(card, table, follow=settings.policy == "adaptive")


def cautious_lengths(engine: Engine, control: ControlClient) -> CautiousLengths:
    """The lengths in use, given the controller's; a policy of the worker's own is followed to the letter."""
    if not control.follow:
        return CautiousLengths(control.table)
    assert engine.dynamic_sd_lookup is not None, "check_config has seen it"
    fast = fast_lengths(engine.vllm_config, engine.dynamic_sd_lookup)
    if len(fast) == 1:
        log.warning(
            f"all batch sizes run at length {min(fast)}: vLLM captures graphs for the lengths that "
            "num_speculative_tokens_per_batch_size names, so name all that may be chosen"
        )
    return CautiousLengths(control.table, fast)
