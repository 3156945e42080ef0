"""transformers on the same weights: static batches, assisted generation, prompt lookup, continuous batching.

Runs in the environment of that peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from closed_loop import Measured, Requests, batches, option_parser, summary
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

PEER = "transformers"
MODES = ("static", "assisted", "lookup", "continuous")
# Continuous batching sizes its cache by free memory, and every step attends over all of it. This is ample for the load.
CACHE = {"num_blocks": 64, "max_batch_tokens": 1024, "page_size": 128}
LARGEST_NGRAM = 3  # that prompt lookup searches for, as with the other peers


def load(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    # Sampling defaults and the end token would make it other work.
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def measure(
    mode: str, concurrency: int, requests: Requests, seconds: float, answer: Callable[[list[list[int]]], int]
) -> Measured:
    """Batches one after the other; the first is a warm-up. Every request of a batch takes as long as the batch."""
    supply = batches(requests, concurrency)
    answer(next(supply))
    latencies: list[float] = []
    tokens, start = 0, time.perf_counter()
    while (begin := time.perf_counter()) < start + seconds:
        tokens += answer(next(supply))
        latencies += [time.perf_counter() - begin] * concurrency
    threads = torch.get_num_threads()
    return summary(PEER, mode, concurrency, threads, tokens, time.perf_counter() - start, latencies)


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], num_tokens: int, **options: Any) -> int:
    ids = torch.tensor(prompts)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, **options
    )
    came = output.shape[1] - ids.shape[1]
    if came != num_tokens:
        raise RuntimeError(f"{came} tokens came instead of {num_tokens}")
    return came * len(prompts)


def static(model: Any, requests: Requests, concurrency: int, seconds: float) -> Measured:
    return measure(
        "generate, static batches",
        concurrency,
        requests,
        seconds,
        lambda prompts: generate(model, prompts, requests.num_tokens),
    )


def assisted(model: Any, draft: Any, requests: Requests, seconds: float, length: int | None) -> Measured:
    """length None: transformers' own schedule and confidence threshold; else always so many tokens."""
    draft.generation_config = GenerationConfig(pad_token_id=0)
    if length is not None:
        draft.generation_config.num_assistant_tokens = length
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
    mode = f"assisted generation, {'its own schedule' if length is None else f'{length} tokens'}"
    return measure(
        mode, 1, requests, seconds, lambda prompts: generate(model, prompts, requests.num_tokens, assistant_model=draft)
    )


def looked_up(model: Any, requests: Requests, seconds: float, length: int) -> Measured:
    """Propose the tokens that followed the last ones when these came before, up to `length`; one sequence at a time."""
    mode = f"prompt lookup, {length} tokens"
    options = {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": LARGEST_NGRAM}
    return measure(mode, 1, requests, seconds, lambda prompts: generate(model, prompts, requests.num_tokens, **options))


def continuous(model: Any, requests: Requests, concurrency: int, seconds: float) -> Measured:
    """Keeps `concurrency` requests in flight; a finished one is replaced at once."""
    config = GenerationConfig(max_new_tokens=requests.num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings = ContinuousBatchingConfig(**CACHE, max_requests_per_batch=concurrency)
    began: dict[str, float] = {}
    latencies: list[float] = []
    supply, finished = batches(requests, 1), 0
    with model.continuous_batching_context_manager(config, continuous_batching_config=settings) as manager:

        def add() -> None:
            name = manager.add_request(next(supply)[0], max_new_tokens=requests.num_tokens, eos_token_id=-1)
            began[name] = time.perf_counter()

        for _ in range(concurrency):
            add()
        start, warm_up = 0.0, concurrency
        while not start or time.perf_counter() < start + seconds:
            result = manager.get_result(timeout=300)
            if result is None or not result.is_finished():
                raise RuntimeError(f"continuous batching failed: {result and result.error}")
            if len(result.generated_tokens) != requests.num_tokens:
                raise RuntimeError(f"{len(result.generated_tokens)} tokens came instead of {requests.num_tokens}")
            if warm_up:
                warm_up -= 1
                start = 0.0 if warm_up else time.perf_counter()
            else:
                finished += 1
                latencies.append(time.perf_counter() - began[result.request_id])
            add()
        elapsed = time.perf_counter() - start
    tokens = finished * requests.num_tokens
    return summary(PEER, "continuous batching", concurrency, torch.get_num_threads(), tokens, elapsed, latencies)


def main() -> None:
    parser = option_parser(__doc__, "target, draft and requests.json")
    parser.add_argument("--mode", choices=MODES, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    requests = Requests.read(options.folder / "requests.json")
    target = load(options.folder / "target")
    if options.mode == "assisted":
        draft = load(options.folder / "draft")
        for length in (None, 3, 6):
            assisted(target, draft, requests, options.seconds, length).print()
        return
    if options.mode == "lookup":
        for length in (5, 10):
            looked_up(target, requests, options.seconds, length).print()
        return
    measured = static if options.mode == "static" else continuous
    for concurrency in options.concurrency:
        measured(target, requests, concurrency, options.seconds).print()


if __name__ == "__main__":
    main()
