"""Drives the engine with one batch at one speculation length."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from speclen.records import PLAIN, Arm, StepRecord
from speclen.worker.drafting.arm_chooser import FixedArm
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.models.loading import ModelPair
from speclen.worker.requests.request import FinishReason, GenerationRequest, SamplingParams, SequenceOutput


@dataclass(slots=True)
class EngineRun:
    """seconds: from submitting the first prompt to the last token. outputs: token ids by number of the prompt.

    steps: those at full batch size that no flag excludes.
    """

    seconds: float
    steps: list[StepRecord] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)


class EngineBench:
    """One engine over a pair, run again and again with other batches and lengths."""

    def __init__(self, pair: ModelPair, max_batch_size: int, max_length: int, backend: str = "auto") -> None:
        self.chooser = FixedArm(PLAIN)
        config = EngineConfig(max_batch_size=max_batch_size, max_speculation_length=max_length, backend=backend)
        self.engine = Engine(pair, config, self.chooser)

    def run(self, prompts: Sequence[tuple[int, ...]], new_tokens: int, length: int) -> EngineRun:
        """Greedy generation of new_tokens for every prompt at once. Raises RuntimeError if a sequence fails."""
        self.chooser.arm = Arm(length)
        run = EngineRun(0.0)
        unfinished = set(range(len(prompts)))
        sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        start = time.perf_counter()
        for number, prompt in enumerate(prompts):
            run.outputs[number] = []
            request = GenerationRequest(f"bench-{number}", tuple(prompt), sampling)
            self.engine.submit(request, self._receiver(number, run, unfinished))
        while unfinished:
            record = self.engine.step()
            # At the end of a sequence a step may use less than the length asked for: it says nothing about that length.
            if record and not record.flags and (record.batch_size, record.arm) == (len(prompts), self.chooser.arm):
                run.steps.append(record)
        run.seconds = time.perf_counter() - start
        return run

    @staticmethod
    def _receiver(number: int, run: EngineRun, unfinished: set[int]) -> Callable[[SequenceOutput], None]:
        def receive(output: SequenceOutput) -> None:
            run.outputs[number].extend(output.token_ids)
            if output.finish_reason is FinishReason.ABORT:
                raise RuntimeError(
                    f"sequence {number} ended before its {output.num_completion_tokens} tokens were complete"
                )
            if output.finish_reason is not None:
                unfinished.discard(number)

        return receive
