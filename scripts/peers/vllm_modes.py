"""vLLM's engine on the same weights, from its build for CPUs, one mode a process, without a server around it.

Runs in the environment of that peer. Prompts are not remembered, as with every peer.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from closed_loop import Requests, option_parser, step_loop, summary

PEER = "vLLM (CPU build)"
MODES = {
    "none": "no draft",
    "fixed:3": "draft model, 3 tokens",
    "fixed:5": "draft model, 5 tokens",
    "ngram:5": "n-gram lookup, 5 tokens",
    "ngram:10": "n-gram lookup, 10 tokens",
}


def set_environment(threads: int) -> None:
    """Set variables that vLLM reads at import. One process, so that two cores are not shared with its own messages."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",  # GiB
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        OMP_NUM_THREADS=str(threads),
    )


def speculation(folder: Path, mode: str) -> dict[str, Any] | None:
    if mode == "none":
        return None
    kind, number = mode.split(":")
    if kind == "ngram":
        return {
            "method": "ngram",
            "num_speculative_tokens": int(number),
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    return {"method": "draft_model", "model": str(folder / "draft"), "num_speculative_tokens": int(number)}


class Engine:
    """The engine that step_loop drives: requests go in, steps are taken, and those that have ended come out."""

    def __init__(self, folder: Path, mode: str, num_rows: int, num_tokens: int) -> None:
        from vllm import EngineArgs, LLMEngine, SamplingParams  # after the environment is set

        settings = EngineArgs(
            model=str(folder / "target"),
            max_num_seqs=num_rows,
            max_model_len=512,
            enable_prefix_caching=False,
            speculative_config=speculation(folder, mode),
            disable_log_stats=True,
        )
        self._engine = LLMEngine.from_engine_args(settings)
        self._sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0)
        self._names = itertools.count()

    def add(self, prompt: list[int]) -> str:
        name = str(next(self._names))
        self._engine.add_request(name, {"prompt_token_ids": prompt}, self._sampling)
        return name

    def step(self) -> list[tuple[str, int]]:
        """Requests that ended, and tokens of each."""
        outputs = [output for output in self._engine.step() if output.finished]
        return [(output.request_id, len(output.outputs[0].token_ids)) for output in outputs]


def main() -> None:
    parser = option_parser(__doc__, "target, draft and requests.json")
    parser.add_argument("--mode", choices=MODES, required=True)
    options = parser.parse_args()
    set_environment(options.threads)
    requests = Requests.read(options.folder / "requests.json")
    engine = Engine(options.folder, options.mode, max(options.concurrency), requests.num_tokens)
    for concurrency in options.concurrency:
        found = step_loop(engine, requests, concurrency, options.seconds)
        summary(PEER, MODES[options.mode], concurrency, options.threads, *found).print()


if __name__ == "__main__":
    main()
