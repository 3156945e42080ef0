"""The track `rollout` of `speclen bench serve` through vLLM's LLM(...): 64 requests at once whose outputs have a long tail.

    python scripts/vllm/rollout.py --seconds 600 --out RESULT.json

Runs in vLLM's environment, on its CPU build. The plugin starts an embedded controller with an empty database, as in a first
run. The table is vLLM's own, by batch size: the best of the fixed lengths in closed loops on other prompts. `adaptive`
learns from a few rollouts; then every policy runs the same rollouts in turns until the time is over. Results are written
after each round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from serving import POLICIES, REQUESTS, Bench, facts

from speclen.bench.gpu.vllm_engine import DRY, engine_arguments, set_environment
from speclen.bench.serving.rounds import mean_ratio
from speclen.bench.serving.traffic import make_block, recipe_of
from speclen.cli.support.output import write_whole

TRACK = "rollout"
PROFILE_SHARE, LEARN_SHARE = 0.1, 0.2  # of the time that is left when the engine is up
FIRST_LEARNING_BLOCK = 1_000_000  # larger than the number of any round


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True, help="for everything, the engine's start included")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--block-s", type=float, help="scales the 64 requests, as with speclen bench serve")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPECLEN_DATA_DIR"] = str(Path(folder) / "data")
        set_environment(DRY, "v1", "embedded")
        (rows,) = recipe_of(TRACK).sizes
        rollouts = Rollouts(Path(folder), rows, options.block_s)
        left_s = until - time.monotonic()
        rollouts.measure_table(left_s * PROFILE_SHARE)
        learned = rollouts.learn(time.monotonic() + left_s * LEARN_SHARE)
        document = facts(rollouts.bench.engine) | {"table": rollouts.table, "learning_s": learned}
        compare(rollouts, until, options.out, document)
        rollouts.bench.scheduler.shutdown()  # the last reports, and then the controller's end
    return 0


def compare(rollouts: Rollouts, until: float, out: Path, document: dict[str, Any]) -> None:
    """Run rounds until the time is over, and write seconds and ratios after each. Ctrl-C keeps the complete ones."""
    rounds: list[dict[str, float]] = []
    begun = time.monotonic()
    for number in itertools.count(1):
        order = [*POLICIES, "table"]
        random.Random(number).shuffle(order)
        try:
            rounds.append({policy: rollouts.run(number, policy) for policy in order})
            print(
                f"round {number}, seconds: { {name: round(value, 2) for name, value in rounds[-1].items()} }",
                flush=True,
            )
        except KeyboardInterrupt:
            document["notes"] = ["interrupted: the rounds that are complete are kept"]
        if len(rounds) > 1:
            document["ratios"] = {
                name: asdict(mean_ratio([one[name] for one in rounds], [one["adaptive"] for one in rounds]))
                for name in rounds[0]
                if name != "adaptive"
            }
        steering = rollouts.bench.steering
        document |= {"rounds": rounds, "steps_reported": steering.num_reported}
        write_whole(out, json.dumps(document, indent=1))
        if "notes" in document or time.monotonic() + (time.monotonic() - begun) / number > until:
            break
    for name, ratio in document.get("ratios", {}).items():
        print(f"adaptive relative to {name}: {ratio['value']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})")


class Rollouts:
    """An LLM with the plugin, and the rollouts that it runs. table: length by batch size, once measured."""

    def __init__(self, folder: Path, rows: int, block_s: float | None) -> None:
        from vllm import LLM

        table = [(1, 1, 5), (2, 2, 3), (3, 3, 1), (4, 4, 0), (5, rows, 3)]  # names all lengths
        self.llm = LLM(**engine_arguments(DRY, folder, table, {}, max_num_seqs=rows))
        self.bench = Bench(self.llm.llm_engine)
        self.rows, self.block_s, self.table = rows, block_s, [0] * (rows + 1)

    def measure_table(self, seconds: float) -> None:
        """Set the table to the best fixed length at each of some batch sizes, in closed loops of other prompts."""
        lengths = {name: length for name, length in POLICIES.items() if length is not None}
        block_s = seconds / len(REQUESTS) / len(lengths)
        best = {}
        for turn, requests in enumerate(REQUESTS):
            blocks = {length: self.bench.block(name, requests, block_s, turn) for name, length in lengths.items()}
            best[requests] = max(blocks, key=lambda length: blocks[length].tokens / blocks[length].seconds)
        sizes = sorted(best)
        for size in range(1, self.rows + 1):  # as in the paper: the next larger size that was measured
            self.table[size] = best[next((each for each in sizes if each >= size), sizes[-1])]
        print(f"table, from the best lengths {best}", flush=True)

    def learn(self, until: float) -> list[float]:
        """Let `adaptive` run rollouts that are not counted; returns their seconds."""
        found = list[float]()
        while not found or time.monotonic() < until:
            found.append(self.run(FIRST_LEARNING_BLOCK + len(found), "adaptive"))
            print(f"learning: {found[-1]:.2f} s, {self.bench.steering.num_reported} steps reported", flush=True)
        return found

    def run(self, number: int, policy: str) -> float:
        """Seconds of one rollout under a policy.

        Policies generate as many tokens, but not the same ones at temperatures above 0: requests have no seeds, since vLLM
        0.32 fails on them on a CPU ("CPU Generator does not use offset").
        """
        from vllm import SamplingParams

        self.bench.use(None if policy == "table" else POLICIES[policy])
        if policy == "table":
            self.bench.scheduler.steering = None
            self.bench.scheduler.dynamic_sd_lookup[:] = self.table
        arrivals = make_block(TRACK, 1.0, number, duration_s=self.block_s).arrivals
        prompts = self.bench.drawer.for_arrivals(arrivals)
        params = [
            SamplingParams(
                max_tokens=arrival.output_tokens,
                temperature=arrival.temperature,
                ignore_eos=True,
                detokenize=False,
            )
            for arrival in arrivals
        ]
        begun = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        return time.perf_counter() - begun


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # an engine takes long to end
