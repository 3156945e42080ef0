"""Decisions before vLLM starts an engine. All are written to vLLM's own configuration, which every rank receives.

The table of lengths in vLLM's configuration names the lengths for which V2 captures full graphs: those of the user's table,
those that the controller has learned, and their neighbours. The scheduler reads the user's own table from
`additional_config`. A draft model on V2 drafts the largest length at every step; `worker_extension_cls` names the class that
makes each rank's worker draft the chosen length. A rank without either does nothing.

Workers load this module only for that class, so the rest of the plugin is imported where it is used.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cache
from importlib import import_module
from typing import Any

log = logging.getLogger("vllm.speclen")

KEY = "speclen"  # in additional_config
TABLE = "num_speculative_tokens_per_batch_size"
EXTENSION = "speclen.integrations.vllm.DraftsChosenLength"
DRAFTING = "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator"
SWITCH = "_maybe_disable_dynamic_sd_for_data_parallel"  # of VllmConfig: drops the table of replicas
OWN_MACHINE = ("uni", "mp")  # executors whose workers run from this environment
LEARNED_S = 5.0  # the longest delay of the start by reading the learned table

Create = Callable[[Any], Any]  # of EngineArgs: VllmConfig


def create_prepared(create: Create, arguments: Any) -> Any:
    """The configuration with the plugin's decisions, or vLLM's own if the plugin cannot serve; the scheduler logs why."""
    spare = attempt(lambda: copy.deepcopy(arguments))  # vLLM changes the first one
    config = create(arguments)
    table = (arguments.speculative_config or {}).get(TABLE)
    return (spare and attempt(lambda: prepared(create, spare, config, table))) or config


def attempt(act: Callable[[], Any]) -> Any:
    """The function's result. If it fails, a traceback is logged and None returned, since an exception would end vLLM."""
    try:
        return act()
    except Exception:
        log.exception("speclen: lengths are those of the configured table alone, since preparing failed")
        return None


def prepared(create: Create, arguments: Any, config: Any, table: Any) -> Any:
    """Create the configuration again with changed arguments; None if nothing changes. table: the user's."""
    from speclen.integrations.vllm.settings import settings_from
    from speclen.process.embedded import DATA_DIR, EMBEDDED

    changes = changes_to(config, table)
    if changes is None:
        return None
    if settings_from(os.environ).controller == EMBEDDED:
        start_controller(os.environ.get(DATA_DIR))
    arguments.speculative_config = {**(arguments.speculative_config or {}), TABLE: changes.pop(TABLE)}
    for name, value in changes.items():
        setattr(arguments, name, value)
    with keeping_table(config):
        return create(arguments)


@cache
def start_controller(data_dir: str | None) -> Any:
    """Start the embedded controller while vLLM loads its models: a short run has few steps to learn from.

    Returns a handle of the process that keeps the controller alive until the scheduler joins. That process lives as long as
    the handle, which the cache keeps as long as this process.
    data_dir: directory of the embedded controller, which is started once for each.
    """
    from speclen.process.embedded import start_early

    return start_early()


def changes_to(config: Any, table: Any) -> dict[str, Any] | None:
    """Arguments of vLLM to change, by name; None if the plugin cannot serve, or if each node makes its own configuration.

    config: VllmConfig as vLLM makes it without the plugin. table: the user's; None: the largest length everywhere.
    """
    from speclen.integrations.vllm.engine import check_config, has_full_graphs, is_recurrent, ranges_of
    from speclen.integrations.vllm.settings import settings_from
    from speclen.worker.config import parse_policy

    own_config = config.additional_config
    try:
        settings = settings_from(os.environ)
        check_config(config, is_whole=True)
    except (ValueError, AttributeError):  # not found in a newer vLLM
        return None
    if config.parallel_config.nnodes > 1 or not isinstance(own_config, dict):
        return None
    rows, longest = config.scheduler_config.max_num_seqs, config.speculative_config.num_speculative_tokens
    build = import_module("vllm.v1.spec_decode.dynamic.utils").build_dynamic_sd_schedule_lookup
    lookup: list[int] = build(table or [(1, rows, longest)], rows, longest)
    captured, arm = lookup, parse_policy(settings.policy)
    if has_full_graphs(config) and not is_recurrent(config):
        if settings.follows_table:
            captured = lookup_to_capture(lookup, learned_by(config), longest)
        elif arm is not None:
            captured = with_lengths(lookup, {min(arm.speculation_length, longest)})
    changes = {
        TABLE: ranges_of(captured, lambda *run: run),
        "additional_config": {**own_config, KEY: {"table": ranges_of(lookup, lambda *run: [*run])}},
    }
    if config.use_v2_model_runner and config.speculative_config.method == "draft_model" and can_extend(config):
        changes["worker_extension_cls"] = EXTENSION
    return changes


def can_extend(config: Any) -> bool:
    """True if all workers run from this environment, and the user has not set another extension."""
    parallel = config.parallel_config
    return parallel.distributed_executor_backend in OWN_MACHINE and not parallel.worker_extension_cls


def lookup_to_capture(lookup: Sequence[int], learned: Mapping[int, int], longest: int) -> list[int]:
    """Lengths by batch size with every length to capture, at a size that uses it if possible. lookup: the user's."""
    used = [min(learned.get(size, length), longest) for size, length in enumerate(lookup)]
    near = {length + offset for length in used[1:] for offset in (-1, 1)}
    return with_lengths(used, set(lookup[1:]) | {length for length in near if 0 <= length <= longest}, lookup)


def with_lengths(used: Sequence[int], wanted: Set[int], first: Sequence[int] = ()) -> list[int]:
    """Lengths by batch size, plus missing lengths at the smallest sizes, where they add the fewest graphs.

    first: lengths to take first if there are not enough batch sizes for all.
    """
    found, num_sizes = list(used), Counter(used[1:])
    missing = sorted(wanted - num_sizes.keys(), key=lambda length: (length not in first, length))
    for size in range(1, len(found)):
        if missing and num_sizes[found[size]] > 1:
            num_sizes[found[size]] -= 1
            found[size] = missing.pop(0)
    return found


@contextlib.contextmanager
def keeping_table(config: Any) -> Iterator[None]:
    """Make vLLM keep the table for replicas that become engines of their own; it drops that of all replicas."""
    from speclen.integrations.vllm.engine import are_independent

    kind, switch_off = type(config), getattr(type(config), SWITCH, None)
    if config.parallel_config.data_parallel_size == 1 or switch_off is None or not are_independent(config):
        yield
        return
    setattr(kind, SWITCH, lambda self: None)
    try:
        yield
    finally:
        setattr(kind, SWITCH, switch_off)


def users_lookup(config: Any) -> list[int] | None:
    """Lengths by batch size as the user has configured them; None if the configuration was not prepared."""
    additional = config.additional_config
    found = additional.get(KEY) if isinstance(additional, dict) else None
    return found and [0, *(length for low, high, length in found["table"] for _ in range(low, high + 1))]


# The learned table. It is read in a separate process: vLLM forks engines from this one, where gRPC must not have run.


def learned_by(config: Any) -> dict[int, int]:
    """Learned length by batch size, if based on samples. Empty if the controller does not answer within LEARNED_S."""
    import vllm
    from vllm.platforms import current_platform

    from speclen.integrations.vllm.engine import context_key
    from speclen.integrations.vllm.settings import settings_from

    key = context_key(config, settings_from(os.environ), current_platform, vllm.__version__)
    command = [sys.executable, "-m", __name__, key.SerializeToString().hex()]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=LEARNED_S, check=True, text=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().rpartition("\n")[2]
        log.info("speclen: graphs are captured for the configured lengths, nothing learned was found: %s", reason)
        return {}
    return {size: length for low, high, length in json.loads(answer) for size in range(low, high + 1)}


def print_learned(key: bytes) -> None:
    """Ask the controller, and print [first size, last size, length] of each best row that is based on samples."""
    import asyncio

    import grpc

    from speclen.integrations.vllm.settings import set_up_logs, settings_from
    from speclen.process.embedded import EMBEDDED, EmbeddedController
    from speclen.process.settings import past_proxies
    from speclen.v1 import control_pb2 as pb
    from speclen.v1 import control_pb2_grpc as rpc

    set_up_logs()
    settings = settings_from(os.environ)
    target = asyncio.run(EmbeddedController().address()) if settings.controller == EMBEDDED else settings.controller
    credentials, options = settings.security.credentials(), past_proxies(target)
    channel = (
        grpc.secure_channel(target, credentials, options) if credentials else grpc.insecure_channel(target, options)
    )
    request = pb.GetLearnedTableRequest(context=pb.ContextKey.FromString(key))
    try:
        answer = rpc.ControlServiceStub(channel).GetLearnedTable(
            request, timeout=LEARNED_S, metadata=settings.security.metadata()
        )
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
    rows = (row for table in answer.tables for row in table.rows if row.is_best and row.source != "prior")
    print(json.dumps([[row.batch_min, row.batch_max, row.speculation_length] for row in rows]))


# In V2's workers.


class DraftsChosenLength:
    """Extension of the worker: vLLM loads it on every rank, after `follow_lengths`."""


def follow_lengths() -> None:
    """Make V2's draft models stop at the chosen length, in engines that name DraftsChosenLength."""
    try:
        speculator = import_module(DRAFTING).StandaloneARSpeculator
        is_new = speculator.propose.__module__ != __name__
        if is_new and "num_speculative_tokens" not in inspect.signature(speculator.propose).parameters:
            raise AttributeError("propose has no argument num_speculative_tokens")
    except Exception as error:  # any exception would end vLLM
        log.warning("speclen: V2's draft model drafts the largest length at every step: %s", error)
        return
    if is_new:
        speculator.propose = following(speculator.propose)


def following(propose: Callable[..., Any]) -> Callable[..., Any]:
    """A `propose` that drafts the requested number of tokens, and at least one, since the draft's keys and values need that
    pass. Its result has the width of the largest length, which vLLM's runner expects.
    """

    def propose_chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
        chosen, largest = kwargs.get("num_speculative_tokens"), getattr(self, "num_speculative_steps", None)
        is_ours = drafts_chosen(getattr(self, "vllm_config", None)) and hasattr(self, "draft_tokens")
        if chosen is None or largest is None or not is_ours:
            return propose(self, *args, **kwargs)
        self.num_speculative_steps = max(1, min(chosen, largest))
        try:
            drafts = propose(self, *args, **kwargs)
        finally:
            self.num_speculative_steps = largest
        return self.draft_tokens[: drafts.shape[0]]

    return propose_chosen


def drafts_chosen(config: Any) -> bool:
    """True if V2's draft model drafts the chosen length on every rank. config: VllmConfig."""
    return config is not None and bool(config.parallel_config.worker_extension_cls == EXTENSION)


if __name__ == "__main__":
    print_learned(bytes.fromhex(sys.argv[1]))
