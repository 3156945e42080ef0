"""Run requests on an engine without a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from speclen.records import StepRecord
from speclen.worker.engine.engine import Engine
from speclen.worker.requests.request import FinishReason, GenerationRequest, SamplingParams, SequenceOutput

GREEDY = SamplingParams(ignore_eos=True)


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    on_step: Callable[[StepRecord], None] = lambda record: None,
    sampling: SamplingParams = GREEDY,
) -> list[list[int]]:
    """Outputs of requests that are submitted together. Raises RuntimeError if the engine aborts one."""
    outputs: list[list[int]] = [[] for _ in prompts]
    ends: list[FinishReason] = []

    def collect(output: SequenceOutput) -> None:
        outputs[int(output.request_id)].extend(output.token_ids)
        if output.finish_reason is not None:
            ends.append(output.finish_reason)

    for number, (prompt, most) in enumerate(zip(prompts, max_tokens, strict=True)):
        engine.submit(GenerationRequest(str(number), tuple(prompt), replace(sampling, max_tokens=most)), collect)
    while len(ends) < len(prompts):
        if (record := engine.step()) is not None:
            on_step(record)
    if FinishReason.ABORT in ends:
        raise RuntimeError(f"{ends.count(FinishReason.ABORT)} of {len(ends)} sequences were given up")
    return outputs
