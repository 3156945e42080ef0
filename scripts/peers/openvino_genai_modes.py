"""OpenVINO GenAI's continuous batching on the same weights, one mode a process, without a server around it.

Runs in the environment of that peer. Models are what optimum-intel exported. Numbers are those of the checkpoint: GenAI
would keep keys and values in 8 bits if it were not told otherwise. Prompts are not remembered, as with every peer.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
from closed_loop import Requests, option_parser, step_loop, summary

PEER = "OpenVINO GenAI"
MODES = {
    "none": "no draft",
    "fixed:3": "draft model, 3 tokens",
    "fixed:5": "draft model, 5 tokens",
    "confidence": "draft model, confidence threshold 0.4",
    "lookup:5": "prompt lookup, 5 tokens",
    "lookup:10": "prompt lookup, 10 tokens",
}
LARGEST_NGRAM = 3  # that prompt lookup searches for


def load(folder: Path, mode: str, threads: int, num_rows: int) -> genai.ContinuousBatchingPipeline:
    options = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16", "INFERENCE_NUM_THREADS": threads}
    properties: dict[str, object] = dict(options)
    if mode.startswith("fixed:") or mode == "confidence":
        properties["draft_model"] = genai.draft_model(folder / "draft-openvino", "CPU", **options)
    if mode.startswith("lookup:"):
        properties["prompt_lookup"] = True
    scheduling = genai.SchedulerConfig()
    scheduling.max_num_seqs, scheduling.max_num_batched_tokens = num_rows, 1024
    scheduling.cache_size = 1  # GiB
    scheduling.enable_prefix_caching = False
    return genai.ContinuousBatchingPipeline(folder / "target-openvino", scheduling, "CPU", properties)


def generation(mode: str, num_tokens: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens, True, False
    if mode.startswith("fixed:"):
        config.num_assistant_tokens = int(mode.removeprefix("fixed:"))
    elif mode == "confidence":
        config.assistant_confidence_threshold = 0.4  # its documentation's
    elif mode.startswith("lookup:"):
        config.num_assistant_tokens = int(mode.removeprefix("lookup:"))
        config.max_ngram_size = LARGEST_NGRAM
    return config


class Pipeline:
    """The engine that step_loop drives: requests go in, steps are taken, and those that have ended come out."""

    def __init__(self, pipeline: genai.ContinuousBatchingPipeline, config: genai.GenerationConfig) -> None:
        self._pipeline = pipeline
        self._config = config
        self._names = itertools.count()
        self._running: dict[int, genai.GenerationHandle] = {}

    def add(self, prompt: list[int]) -> int:
        name = next(self._names)
        ids = ov.Tensor(np.array([prompt], np.int64))
        self._running[name] = self._pipeline.add_request(name, ids, self._config)
        return name

    def step(self) -> list[tuple[int, int]]:
        """Requests that ended, and tokens of each."""
        self._pipeline.step()
        ended = [
            name for name, handle in self._running.items() if handle.get_status() != genai.GenerationStatus.RUNNING
        ]
        return [(name, sum(len(o.generated_ids) for o in self._running.pop(name).read_all())) for name in ended]


def main() -> None:
    parser = option_parser(__doc__, "target-openvino, draft-openvino and requests.json")
    parser.add_argument("--mode", choices=MODES, required=True)
    options = parser.parse_args()
    requests = Requests.read(options.folder / "requests.json")
    loaded = load(options.folder, options.mode, options.threads, max(options.concurrency))
    pipeline = Pipeline(loaded, generation(options.mode, requests.num_tokens))
    for concurrency in options.concurrency:
        found = step_loop(pipeline, requests, concurrency, options.seconds)
        summary(PEER, MODES[options.mode], concurrency, options.threads, *found).print()


if __name__ == "__main__":
    main()
