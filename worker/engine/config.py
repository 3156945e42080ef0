"""Settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from speclen.records import NGRAM_MAX_TOKENS
from speclen.worker.backends.passes import padded_width


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every default works. backend: one of `naming.BACKENDS`."""

    max_batch_size: int = 32  # rows, decoding and prefilling together
    max_speculation_length: int = 8  # draft tokens per row and step, at most
    ngram: bool = False  # arms may propose n-gram tokens
    max_context_length: int | None = None  # tokens of prompt and output; None: the models' limit, or what fits on a GPU
    max_kv_tokens: int | None = None  # tokens of KV over all rows; None: what fits into half of the free memory
    max_cached_tokens: int = 8192  # of prompts and outputs remembered for requests that begin alike; OpenVINO only
    prefill_chunk: int = 256  # prompt tokens per iteration: how long a prompt may hold up the rows that decode
    seed: int | None = None  # of requests that bring none; None: drawn at random
    backend: str = (
        "auto"  # auto: OpenVINO where it is installed and runs the models exactly, else torch; or one of the two
    )
    check_models: bool = True  # compare each model with its plain forward before serving
    max_recordings: int = 256  # passes recorded as CUDA graphs on a GPU, the least used goes first; 0: none are
    record_ahead_s: float = 30.0  # of a start, for recording them before they occur, at most
    rewrite_models: bool = True  # run Llama-style models in fewer operators than transformers does
    pack_weights: bool = True  # on a CPU, a second copy of the weights in its kernels' own layout, if memory allows

    @property
    def max_proposed_tokens(self) -> int:
        """Tokens per row and step that may turn out wrong: places that a row needs beyond its own."""
        if not self.ngram:
            return self.max_speculation_length
        return padded_width(max(self.max_speculation_length, NGRAM_MAX_TOKENS))
