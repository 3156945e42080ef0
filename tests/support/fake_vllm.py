"""vLLM's scheduler interface without vLLM: what version 0.32 passes to a subclass, in the same order.

`install` puts the modules where `speclen.integrations.vllm.scheduler` imports them from. Tests set how many drafts the
model accepts.
"""

import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

VERSION = "0.32.0"


@dataclass
class Request:
    request_id: str
    num_prompt_tokens: int
    num_tokens: int = 0  # prompt and output
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    is_prefill_chunk: bool = False
    is_over: bool = False  # but kept for somebody who still reads its KV
    spec_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_tokens or self.num_prompt_tokens

    def is_finished(self) -> bool:
        return self.is_over


@dataclass
class NewRequestData:
    req_id: str


@dataclass
class CachedRequestData:
    resumed_req_ids: set[str]
    num_computed_tokens: list[int]


@dataclass
class ModelRunnerOutput:
    sampled_token_ids: list[list[int]]
    req_id_to_index: dict[str, int]


@dataclass
class SchedulerOutput:
    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: Any
    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]
    num_spec_tokens_to_schedule: int = 0
    num_invalid_spec_tokens: dict[str, int] | None = None


def scheduled(
    tokens: dict[str, int],
    drafts: dict[str, list[int]] | None = None,
    contexts: list[int] | None = None,
    new: Iterable[str] = (),
    resumed: Iterable[str] = (),
) -> SchedulerOutput:
    """A step. tokens: to compute, by sequence; contexts: of the sequences that are not new."""
    requests = [NewRequestData(name) for name in new]
    return SchedulerOutput(requests, CachedRequestData(set(resumed), contexts or []), tokens, drafts or {})


class Scheduler:
    """As vllm.v1.core.sched.scheduler.Scheduler, as far as lengths go."""

    chunk = 64  # prompt tokens a step
    most_admitted = 64  # requests a step

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.num_spec_tokens = (
            vllm_config.speculative_config.num_speculative_tokens if vllm_config.speculative_config else 0
        )
        self.dynamic_sd_lookup = lookup_of(vllm_config)
        self.max_num_running_reqs = vllm_config.scheduler_config.max_num_seqs
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.connector = self.ec_connector = None
        self.ended = False

    def add(self, name: str, num_prompt_tokens: int) -> None:
        request = self.requests[name] = Request(name, num_prompt_tokens)
        self.waiting.append(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        free = min(self.max_num_running_reqs - len(self.running), self.most_admitted)
        new = self.waiting[:free]
        cached, tokens, drafts = list(self.running), {}, {}
        del self.waiting[: len(new)]
        self.running += new
        for request in (*cached, *new):
            wanted = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
            tokens[request.request_id] = min(wanted + len(request.spec_token_ids), self.chunk)
            if request.spec_token_ids:
                drafts[request.request_id] = request.spec_token_ids
                request.spec_token_ids = []
        contexts = [each.num_computed_tokens for each in cached]
        output = scheduled(tokens, drafts, contexts, [each.request_id for each in new])
        length = self.dynamic_sd_lookup[len(tokens)] if self.dynamic_sd_lookup and tokens else self.num_spec_tokens
        output.num_spec_tokens_to_schedule = length
        if self.connector is not None:
            self._build_kv_connector_meta(self.connector, output)
        self._update_after_schedule(output)
        return output

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: SchedulerOutput) -> Any:
        return connector.build_connector_meta(scheduler_output)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[name]
            request.num_computed_tokens += tokens
            request.is_prefill_chunk = (
                request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
            )

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> dict[int, Any]:
        for name, index in model_runner_output.req_id_to_index.items():
            request = self.requests.get(name)
            new = model_runner_output.sampled_token_ids[index]
            if request is None or request.is_finished():
                continue
            rejected = len(scheduler_output.scheduled_spec_decode_tokens.get(name, ())) - (len(new) - 1)
            if name in scheduler_output.scheduled_spec_decode_tokens:
                request.num_computed_tokens -= rejected
            self.deliver(request, new, rejected, name in scheduler_output.scheduled_spec_decode_tokens)
        return {}

    def deliver(self, request: Request, new: list[int], rejected: int, drafted: bool) -> None:
        request.num_tokens += len(new)

    def update_draft_token_ids(self, scheduler_output: SchedulerOutput) -> None:
        """Stands for the engine's work between two steps that do not overlap."""
        for name in scheduler_output.num_scheduled_tokens:
            if (request := self.requests.get(name)) and not request.is_prefill_chunk:
                request.spec_token_ids = [7] * scheduler_output.num_spec_tokens_to_schedule

    def shutdown(self) -> None:
        self.ended = True


class AsyncScheduler(Scheduler):
    """As vllm.v1.core.sched.async_scheduler.AsyncScheduler: output and drafts are placeholders until they are there."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests[name]
            if not request.is_prefill_chunk:
                drafted = len(scheduler_output.scheduled_spec_decode_tokens.get(name, ()))
                request.num_output_placeholders += 1 + drafted
                request.spec_token_ids = [-1] * scheduler_output.num_spec_tokens_to_schedule

    def deliver(self, request: Request, new: list[int], rejected: int, drafted: bool) -> None:
        request.num_output_placeholders -= len(new) + (rejected if drafted else 0)
        request.num_tokens += len(new)


def lookup_of(config: Any) -> list[int] | None:
    if config.speculative_config is None or not config.speculative_config.num_speculative_tokens_per_batch_size:
        return None
    speculative = config.speculative_config
    return build_dynamic_sd_schedule_lookup(
        speculative.num_speculative_tokens_per_batch_size,
        config.scheduler_config.max_num_seqs,
        speculative.num_speculative_tokens,
    )


def build_dynamic_sd_schedule_lookup(
    table: Any, vllm_max_batch_size: int, vllm_num_speculative_tokens: int
) -> list[int]:
    lookup = [0] * (vllm_max_batch_size + 1)
    for low, high, length in table:
        for size in range(low, min(high, vllm_max_batch_size) + 1):
            lookup[size] = min(length, vllm_num_speculative_tokens)
    return lookup


def sampled(accepted: dict[str, int | None]) -> Any:
    """A ModelRunnerOutput. accepted: run of each sequence, or None for one that is still in prefill."""
    rows = [[] if run is None else [1] * (run + 1) for run in accepted.values()]
    return ModelRunnerOutput(rows, {name: i for i, name in enumerate(accepted)})


class VllmConfig(SimpleNamespace):
    def _maybe_disable_dynamic_sd_for_data_parallel(self) -> None:
        if self.parallel_config.data_parallel_size > 1:
            self.speculative_config.num_speculative_tokens_per_batch_size = None


def config(**changes: Any) -> Any:
    """A VllmConfig: what of it is looked at. changes: by the dotted name, with __ for the dot."""
    draft = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 64}), max_model_len=4096)
    whole = VllmConfig(
        model_config=SimpleNamespace(
            model="/models/target",
            dtype="torch.bfloat16",
            hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 768}),
            enforce_eager=True,
            quantization=None,
            max_model_len=4096,
            is_hybrid=False,
            has_inner_state=False,
            is_moe=False,
        ),
        speculative_config=SimpleNamespace(
            method="draft_model",
            model="/models/draft",
            num_speculative_tokens=5,
            num_speculative_tokens_per_batch_size=[(1, 4, 5), (5, 8, 2)],
            draft_model_config=draft,
            draft_tensor_parallel_size=1,
            prompt_lookup_min=2,
            prompt_lookup_max=4,
            parallel_drafting=False,
            enable_adaptive_verification=False,
        ),
        parallel_config=SimpleNamespace(
            **dict.fromkeys(
                ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "world_size", "nnodes"), 1
            ),
            data_parallel_index=0,
            distributed_executor_backend="uni",
            worker_extension_cls="",
            reconfigure_for_independent_dp_rank=None,
        ),
        scheduler_config=SimpleNamespace(async_scheduling=False, max_num_seqs=8, max_num_batched_tokens=2048),
        compilation_config=SimpleNamespace(
            cudagraph_mode="NONE",
            mode="NONE",
            cudagraph_capture_sizes=[1, 2, 4, 8, 16, 24],
            max_cudagraph_capture_size=24,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        use_v2_model_runner=False,
        additional_config={},
    )
    for name, value in changes.items():
        part, _, field_name = name.partition("__")
        setattr(*((getattr(whole, part), field_name) if field_name else (whole, part)), value)
    return whole


class EngineArgs:
    """Makes configurations as vLLM does, which writes into its arguments and drops the table of replicas."""

    def __init__(
        self, scheduler_cls: Any = None, speculative_config: dict[str, Any] | None = None, **changes: Any
    ) -> None:
        self.scheduler_cls = scheduler_cls
        self.speculative_config = speculative_config or {}
        self.additional_config: Any = {}
        self.worker_extension_cls = ""
        self.changes = changes
        self.num_created = 0

    def create_engine_config(self, usage_context: Any = None) -> Any:
        self.num_created += 1
        found = config(**self.changes)
        for name, value in self.speculative_config.items():
            setattr(found.speculative_config, name, value)
        self.speculative_config = {**self.speculative_config, "target_model_config": found.model_config}
        found.additional_config = self.additional_config
        found.parallel_config.worker_extension_cls = self.worker_extension_cls
        found._maybe_disable_dynamic_sd_for_data_parallel()  # noqa: SLF001
        return found


PLATFORM = SimpleNamespace(is_cpu=lambda: True, is_cuda=lambda: False, device_type="cpu", get_device_name=lambda: "cpu")


def install(monkeypatch: Any, version: str = VERSION) -> None:
    """Make `import vllm` find the above, and forget the module that imported it before."""
    members = {name: vars(EngineArgs)[name] for name in ("__init__", "create_engine_config")}
    arguments = type("EngineArgs", (), members)  # a copy, since `register` changes it
    contents = {
        "vllm": {"__version__": version},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"EngineArgs": arguments},
        "vllm.platforms": {"current_platform": PLATFORM},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.sched": {},
        "vllm.v1.core.sched.output": {
            each.__name__: each for each in (CachedRequestData, NewRequestData, SchedulerOutput)
        },
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": AsyncScheduler},
        "vllm.v1.outputs": {"ModelRunnerOutput": ModelRunnerOutput},
        "vllm.v1.request": {"Request": Request},
        "vllm.v1.spec_decode": {},
        "vllm.v1.spec_decode.dynamic": {},
        "vllm.v1.spec_decode.dynamic.utils": {"build_dynamic_sd_schedule_lookup": build_dynamic_sd_schedule_lookup},
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "speclen.integrations.vllm.scheduler", raising=False)
