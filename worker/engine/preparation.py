"""Preparation of a target and draft model: a backend, KV caches that fit in memory, and the check of each model."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch

from speclen.records import NGRAM_MAX_TOKENS, Limits
from speclen.worker.backends import openvino
from speclen.worker.backends.check import LEAST_TOKENS, NUM_TAIL, check_model, inspect_layers
from speclen.worker.backends.kv_cache import KVPool, LayerShape, free_memory
from speclen.worker.backends.openvino.blocks import BlockPool
from speclen.worker.backends.passes import PassModel, padded_width
from speclen.worker.backends.torch.attention import install
from speclen.worker.backends.torch.cached_model import CachedModel
from speclen.worker.backends.torch.captured_model import CapturedModel, GraphRecorder, Recorder
from speclen.worker.backends.torch.llama import rewrite
from speclen.worker.backends.torch.packed_linear import pack_linears, private_copy
from speclen.worker.models.loading import ModelPair, quiet_transformers
from speclen.worker.models.naming import ModelError, check_settings

log = logging.getLogger(__name__)

POOL_SHARE = {"cuda": 0.8, "cpu": 0.5}  # share of the free memory for keys and values
# Memory to choose tokens on a GPU: bytes per row, position and vocabulary entry (tests/unit/test_sampling_cost.py).
SAMPLING_BYTES = 24
# Queries and logits per row of the draft model's passes: it lacks one token, or two after a fully accepted draft.
DRAFT_WIDTHS = ((1, 1), (2, 1))
# Tokens of the longest row in the check of our kernels, which read up to 128 keys at once. Triton's interpreter is slow.
KERNEL_TOKENS = {"cuda": 3 * 128}
# Smallest context of a row. If memory does not suffice for it, there are fewer rows.
LEAST_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine. backend: one of `naming.BACKENDS`."""

    max_batch_size: int = 32  # sequences, decoding and prefilling
    max_speculation_length: int = 8  # draft tokens per row and step, at most
    ngram: bool = False  # arms may have n-grams
    max_context_length: int | None = None  # tokens of prompt and output; None: the models' limit, or what fits on a GPU
    max_kv_tokens: int | None = None  # tokens of KV over all rows; None: what fits into half of the free memory
    max_cached_tokens: int = 8192  # of the prefix cache; OpenVINO only
    prefill_chunk: int = 256  # prompt tokens per step: bounds the delay of decoding sequences
    seed: int | None = None  # of requests without a seed; None: random
    backend: str = "auto"  # OpenVINO where it is installed and runs the models exactly, else torch
    check_models: bool = True  # compare each model with its plain forward before serving
    max_recordings: int = 256  # CUDA graphs kept on a GPU, the least recently used is evicted; 0: none
    record_ahead_s: float = 30.0  # for capturing graphs at the start, at most

    @property
    def max_proposed_tokens(self) -> int:
        """Tokens per row and step that may be rejected: positions that a row needs beyond its own."""
        if not self.ngram:
            return self.max_speculation_length
        return padded_width(max(self.max_speculation_length, NGRAM_MAX_TOKENS))


@dataclass(frozen=True, slots=True)
class PreparedPair:
    """The models as a backend runs them, and what fits in memory.

    draft: None if nothing can be drafted. limits, max_context_length: as configured, or smaller to fit. max_kv_tokens:
    capacity over all rows, in tokens that take the memory of both models. backend: name and version.
    """

    target: PassModel
    draft: PassModel | None
    limits: Limits
    max_context_length: int
    max_kv_tokens: int
    backend: str


@dataclass(frozen=True, slots=True)
class _Named:
    """A model as transformers runs it, with the user's name for it, its layers' shapes, and its number of positions."""

    model: Any
    name: str
    layers: list[LayerShape]
    context: int


@torch.inference_mode()
def prepare(pair: ModelPair, config: EngineConfig, recorder: Recorder | None = None) -> PreparedPair:
    """Prepare both models on a backend. The given models are not changed, and share their weights with the result.

    recorder: captures decoding passes; None: CUDA graphs on a GPU, no capture elsewhere. Raises ModelError if a model cannot
    be served exactly, or if its keys and values do not fit in memory.
    """
    check_settings(backend=config.backend)
    named = [_named(pair.target, pair.target_name, pair.max_context_length)]
    if pair.draft is not None and config.max_speculation_length:
        named.append(_named(pair.draft, pair.draft_name, pair.draft_context_length or pair.max_context_length))
    bytes_per_token = sum(shape.elements_per_token for one in named for shape in one.layers) * pair.dtype.itemsize
    # Tokens whose keys and values fit in memory. On a GPU the caches are allocated in full, and passes need memory, too.
    budget = int(POOL_SHARE[pair.device.type] * free_memory(pair.device)) // bytes_per_token
    num_rows, context = _rows_and_context(pair, config, budget, bytes_per_token)
    config = replace(config, max_batch_size=num_rows)
    named = [replace(one, context=min(context, one.context)) for one in named]
    kv_tokens = num_rows * (context + config.max_proposed_tokens)
    if config.max_kv_tokens is not None or pair.device.type == "cpu":
        kv_tokens = min(kv_tokens, budget if config.max_kv_tokens is None else config.max_kv_tokens)
    models = None
    if config.backend != "torch" and recorder is None:
        models, backend = _on_openvino(named, config, pair), f"openvino {openvino.installed_version()}"
    if models is None:
        models, backend = _on_torch(named, config, pair, recorder), f"torch {version('torch')}"
    draft = models[1] if len(models) == 2 else None
    limits = Limits(num_rows, config.max_speculation_length if draft is not None else 0, config.ngram)
    return PreparedPair(models[0], draft, limits, context, kv_tokens, backend)


def _named(model: Any, name: str, context: int) -> _Named:
    return _Named(model, name, inspect_layers(private_copy(model), name), context)


def _on_openvino(named: Sequence[_Named], config: EngineConfig, pair: ModelPair) -> list[PassModel] | None:
    """The models on OpenVINO, checked against transformers; None if torch has to run them.

    Raises ModelError if OpenVINO was asked for by name and cannot run them.
    """
    reason = openvino.why_not(pair.device, pair.dtype)
    if reason is None:
        try:
            return [_load_openvino(one, config, pair) for one in named]
        except Exception as error:  # OpenVINO raises errors of all kinds for unknown operators.
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            reason = lines[-1][:300]  # OpenVINO names the cause in the last line
    if config.backend == "openvino":
        raise ModelError(f"--backend openvino: {reason}")
    log.log(
        logging.WARNING if openvino.installed_version() else logging.INFO,
        "torch runs the models, not OpenVINO: %s",
        reason,
    )
    return None


def _load_openvino(one: _Named, config: EngineConfig, pair: ModelPair) -> PassModel:
    row_length = one.context + config.max_proposed_tokens
    pool = BlockPool(one.layers, config.max_batch_size, row_length, pair.dtype, config.max_cached_tokens)
    with quiet_transformers():
        model = openvino.load(one.model, pool, one.context)
    if config.check_models:
        check_model(model, one.model, one.name)
    return model


def _on_torch(
    named: Sequence[_Named], config: EngineConfig, pair: ModelPair, recorder: Recorder | None
) -> list[PassModel]:
    cached = [_make_ready(one, _make_pool(one, config, pair), config) for one in named]
    if recorder is None and pair.device.type == "cuda" and config.max_recordings:
        recorder = GraphRecorder(pair.device)
    if recorder is None:
        return [*cached]
    captured = [
        CapturedModel(one, recorder, _spare_tokens(config), config.max_recordings, widths)
        for one, widths in zip(cached, (_target_widths(config, len(cached) > 1), DRAFT_WIDTHS), strict=False)
    ]
    started = time.monotonic()
    for model in captured:
        model.compile_kernels()
    if captured[0].has_kernels:
        log.info("compiled Triton's kernels in %.1f s", time.monotonic() - started)
    for model, one in zip(captured, named, strict=True):
        _check_kernels(model, one, config)
    # A capture while serving takes ten times as long as a pass. The draft model's, which are quicker, come first.
    started = time.monotonic()
    number = sum(model.record_ahead(started + config.record_ahead_s) for model in reversed(captured))
    if number:
        log.info("captured %d passes in %.1f s", number, time.monotonic() - started)
    return [*captured]


def _target_widths(config: EngineConfig, drafts: bool) -> list[tuple[int, int]]:
    """Numbers of queries and logits per row that occur in verification."""
    lengths = set(range(config.max_speculation_length + 1 if drafts else 1))
    if config.ngram:
        lengths |= {padded_width(proposed) for proposed in range(1, config.max_proposed_tokens + 1)}
    return [(length + 1, length + 1) for length in sorted(lengths)]


def _check_kernels(captured: CapturedModel, one: _Named, config: EngineConfig) -> None:
    """Stop using our kernels in captured passes if they change the logits."""
    if not (config.check_models and captured.has_kernels):
        return
    widest = max((queries for queries, _ in captured.widths), default=NUM_TAIL)
    try:
        check_model(captured, one.model, one.name, KERNEL_TOKENS.get(captured.device.type, LEAST_TOKENS), widest)
    except ModelError as error:
        captured.leave_out_kernels(str(error))


def _make_ready(one: _Named, pool: KVPool, config: EngineConfig) -> CachedModel:
    """The model as the engine runs it, checked against transformers. Raises ModelError."""
    model = private_copy(one.model)
    install(model)

    def checked(ours: Any) -> CachedModel:
        pack_linears(ours, free_memory(pool.device) // 4)
        cached = CachedModel(ours, pool, one.context)
        if config.check_models:
            check_model(cached, one.model, one.name)
        return cached

    try:
        rewritten = rewrite(model, pool.shapes, one.context)
        if rewritten is not None:
            return checked(rewritten)
    except Exception as error:  # in another version of transformers, whose own operators still work
        log.warning("%s runs in transformers' own operators, which is slower: %s", one.name, error)
    return checked(model)


def _make_pool(one: _Named, config: EngineConfig, pair: ModelPair) -> KVPool:
    length = one.context + config.max_proposed_tokens + _spare_tokens(config)
    try:
        return KVPool(one.layers, config.max_batch_size, length, pair.dtype, pair.device)
    except MemoryError as error:
        raise ModelError(str(error)) from error


def _spare_tokens(config: EngineConfig) -> int:
    """Positions per row beyond the context, for padding rows of captured passes to write to.

    As many as such a pass has queries per row: those of verification, or the draft model's two.
    """
    return max(2, config.max_proposed_tokens + 1)


def _rows_and_context(pair: ModelPair, config: EngineConfig, budget: int, bytes_per_token: int) -> tuple[int, int]:
    """Numbers of rows and of tokens per row, reduced to fit in memory. budget: tokens that fit in memory."""
    wanted = config.max_batch_size, min(pair.max_context_length, config.max_context_length or pair.max_context_length)
    # A row's logits, and choosing its tokens, take as much memory as this many tokens' keys and values.
    logit_bytes = (SAMPLING_BYTES + pair.dtype.itemsize) * pair.vocab_size
    sampling = -(-logit_bytes * (config.max_proposed_tokens + 1) // bytes_per_token)
    spare, gib = config.max_proposed_tokens + _spare_tokens(config), budget * bytes_per_token / 2**30
    if pair.device.type == "cpu":
        # The kernel allocates pages when they are first written, so rows share the memory.
        fitting = wanted[0], min(wanted[1], max(LEAST_CONTEXT, budget - spare))
    else:
        least = wanted[1] if config.max_context_length else min(LEAST_CONTEXT, wanted[1])
        fitting = fit_rows(*wanted, least, spare + sampling, budget)
        if not fitting[0]:
            raise ModelError(
                f"a single sequence of {least} tokens needs more than the {gib:.1f} GiB left on {pair.device}: "
                "use a smaller model or another device"
            )
    if fitting != wanted:
        sizes = *fitting, *wanted
        log.warning("%.1f GiB are left on %s: %d sequences may hold %d tokens, not %d of %d", gib, pair.device, *sizes)
    return fitting


def fit_rows(num_rows: int, num_tokens: int, least_tokens: int, spare: int, budget: int) -> tuple[int, int]:
    """All rows with as many tokens as fit; if that is below least_tokens, fewer rows with least_tokens each.

    spare: positions per row on top of its tokens. budget: positions that fit in memory. (0, least_tokens) if no row fits.
    """
    fitting = min(num_tokens, budget // num_rows - spare)
    if fitting >= least_tokens:
        return num_rows, fitting
    return budget // (least_tokens + spare), least_tokens
