"""What structured output costs: a batch of which nobody, one or everybody follows a grammar, in turn on one engine.

    python -m speclen.bench.engine.grammar_cost --rows 16 --length 3

The grammar allows any text, so all of them write alike, and only the following of it differs. Beside the time of a step
stands the CPU time of the engine's own thread, which other programs on the machine hardly change.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict

from speclen.bench.machine import machine
from speclen.bench.spread import ratio, spread
from speclen.records import Arm
from speclen.worker.backends.threads import set_threads
from speclen.worker.drafting.arm_chooser import FixedArm
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.models.loading import ModelPair, load_pair
from speclen.worker.requests.request import GenerationRequest, SamplingParams, StructuredOutput
from speclen.worker.sampling.grammar import Grammar
from speclen.worker.structured import trial
from speclen.worker.structured.source import source

ANY_TEXT = r"(.|\n)*"
KINDS = ("nobody", "one", "everybody")


def any_text(pair: ModelPair) -> Grammar:
    ends = list(pair.eos_token_ids)
    tokenizer = trial.make_tokenizer(pair.tokenizer.backend_tokenizer.to_str(), None, ends)
    return Grammar(trial.make_matcher(tokenizer, source(StructuredOutput("regex", ANY_TEXT))), pair.vocab_size, ends)


def seconds(
    engine: Engine, prompts: list[list[int]], grammars: list[Grammar | None], sampling: SamplingParams
) -> tuple[float, float]:
    """Of the clock and of the thread's CPU, per step of all rows."""
    for at, (ids, grammar) in enumerate(zip(prompts, grammars, strict=True)):
        engine.submit(GenerationRequest(str(at), tuple(ids), sampling, grammar=grammar), lambda output: None)
    while engine.scheduler.num_decoding < len(prompts):
        engine.step()
    started, cpu, steps = time.perf_counter(), time.thread_time(), engine.load().num_steps
    while len(engine.scheduler.rows) == len(prompts):
        engine.step()
    steps = engine.load().num_steps - steps
    took = (time.perf_counter() - started) / steps, (time.thread_time() - cpu) / steps
    while engine.load().num_running:
        engine.step()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    pair = load_pair("bundled:target", "bundled:draft", "cpu")
    set_threads(0, pair)
    engine = Engine(pair, EngineConfig(max_batch_size=arguments.rows, seed=0), FixedArm(Arm(arguments.length)))
    prompts = [pair.tokenizer(f"def function_{at}(a, b):\n    ")["input_ids"] for at in range(arguments.rows)]
    sampling = SamplingParams(arguments.temperature, max_tokens=arguments.max_tokens, ignore_eos=True)
    grammar, times = any_text(pair), {kind: list[tuple[float, float]]() for kind in KINDS}
    for repeat in range(arguments.repeats + 1):
        for kind in KINDS:
            number = {"nobody": 0, "one": 1, "everybody": arguments.rows}[kind]
            grammars = [grammar if at < number else None for at in range(arguments.rows)]
            took = seconds(engine, prompts, grammars, sampling)
            if repeat:  # the first one warms up
                times[kind].append(took)
    result = {"settings": vars(arguments), "machine": machine(pair.device), "backend": engine.backend}
    for at, name in enumerate(("step", "thread_cpu_of_a_step")):
        of = {kind: [one[at] for one in found] for kind, found in times.items()}
        result[f"{name}_ms"] = {kind: asdict(spread([1000 * one for one in found])) for kind, found in of.items()}
        result[f"{name}_over_that_of_nobody"] = {kind: asdict(ratio(of[kind], of["nobody"])) for kind in KINDS[1:]}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
