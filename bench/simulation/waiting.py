"""How much of the wait for a first token a choice should bear: mean latency in a server made of a measured profile.

    python -m speclen.bench.simulation.waiting --profile docs/results/profile.json

Requests come at random, and their prompts are fed along with the steps of the rows that decode. Beside the profile's lengths
there is a plan of shorter steps that makes nearly as many tokens per second as the best length, as copying does. Each choice
is a table by batch size: least step time x (1 / tokens per step + steps x new rows / tokens), for several numbers of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from speclen.bench.profile.document import read_document
from speclen.bench.simulation.profiled_server import ProfiledMachine, Traffic, make_traffic
from speclen.controller.estimator.arrays import FloatArray

CHUNK = 256  # tokens of prompts in a step, as a worker's
FIRST_STEP_S = 0.002  # of a step that feeds prompts beside no row, without its tokens
MEAN_PROMPT, MEAN_TOKENS = 400, 64
SHORT = 0.5  # length of the shorter steps, in those of the best length
LOADS = (0.15, 0.4, 0.6, 0.8)  # of what the best length makes with every row busy, prompts included
NUM_REQUESTS, NUM_SEEDS = 4000, 4


@dataclass(frozen=True, slots=True)
class Plans:
    """What can be played: step times and tokens per row, [batch sizes, plans]; prompt_s: that a token of a prompt takes."""

    step_s: FloatArray
    tokens: FloatArray
    prompt_s: float

    @property
    def capacity(self) -> float:
        """Requests a second with every row busy, at the best plan."""
        rows = len(self.step_s) - 1
        return 1.0 / (MEAN_TOKENS * (self.step_s[rows] / self.tokens[rows]).min() / rows + MEAN_PROMPT * self.prompt_s)

    def table(self, steps_per_token: float) -> list[int]:
        """The plan by batch size, where every token bears so many steps of waiting."""
        best: list[int] = (self.step_s * (1.0 / self.tokens + steps_per_token)).argmin(axis=1).tolist()
        return best


@dataclass(frozen=True, slots=True)
class Served:
    """new_per_token: rows that were new beside others that decoded, over tokens put out."""

    latency_s: float
    new_per_token: float


def with_shorter(machine: ProfiledMachine, goodput: float, prompt_s: float) -> Plans:
    """The profile's lengths, and a plan of shorter steps with so many tokens per second, in those of the best length."""
    tokens = np.tile(machine.expected_tokens(), (len(machine.step_s), 1))
    best = (machine.step_s / tokens).argmin(axis=1)
    rows = np.arange(len(best))
    short_s, short_tokens = SHORT * machine.step_s[rows, best], SHORT * goodput * tokens[rows, best]
    return Plans(np.column_stack([machine.step_s, short_s]), np.column_stack([tokens, short_tokens]), prompt_s)


def serve(plans: Plans, traffic: Traffic, prompts: np.ndarray, table: list[int], seed: int) -> Served:
    """Serve all of it, first come first served; a plan's tokens are its expected ones, rounded at random."""
    rng = np.random.default_rng(seed)
    left, unfed = traffic.num_tokens.copy(), prompts.copy()
    ended_s, most = np.zeros(len(left)), len(plans.step_s) - 1
    now, arrived, num_new, num_tokens = 0.0, 0, 0, 0
    feeding: list[int] = []
    decoding: list[int] = []
    while arrived < len(left) or feeding or decoding:
        if not feeding and not decoding:
            now = max(now, float(traffic.arrivals_s[arrived]))
        before = len(feeding)
        while arrived < len(left) and traffic.arrivals_s[arrived] <= now and len(feeding) + len(decoding) < most:
            feeding.append(arrived)
            arrived += 1
        plan, size = table[len(decoding)], len(decoding)
        room = CHUNK
        for each in feeding:
            fed = min(room, int(unfed[each]))
            unfed[each] -= fed
            room -= fed
        now += (CHUNK - room) * plans.prompt_s + (plans.step_s[size, plan] if size else FIRST_STEP_S)
        if size:
            num_new += len(feeding) - before
            mean = plans.tokens[size, plan]
            got = np.minimum(np.floor(mean + rng.random(size)).astype(int), left[decoding])
            left[decoding] -= got
            num_tokens += int(got.sum())
        begun = [each for each in feeding if not unfed[each]]
        left[begun] -= 1
        decoding += begun
        ended_s[[each for each in decoding if not left[each]]] = now
        decoding = [each for each in decoding if left[each]]
        feeding = [each for each in feeding if unfed[each]]
    return Served(float((ended_s - traffic.arrivals_s).mean()), num_new / num_tokens)


def compare(plans: Plans, load: float, steps: list[float]) -> list[float]:
    """Mean latency where so many steps of waiting are borne, over that where none is; the mean over seeds."""
    ratios = []
    for seed in range(NUM_SEEDS):
        traffic = make_traffic(load * plans.capacity, 1.0, NUM_REQUESTS, 1, MEAN_TOKENS, seed)
        sizes = np.random.default_rng(seed).lognormal(np.log(MEAN_PROMPT) - 0.18, 0.6, NUM_REQUESTS)
        prompts = np.maximum(16, sizes).astype(int)
        none = serve(plans, traffic, prompts, plans.table(0.0), seed)
        tables = [plans.table(each * none.new_per_token) for each in steps]
        ratios.append([serve(plans, traffic, prompts, table, seed).latency_s / none.latency_s for table in tables])
    return [float(each) for each in np.mean(ratios, axis=0)]


def main(
    profile: Annotated[Path, typer.Option(help="What `speclen profile run --out` wrote.")],
    steps: Annotated[str, typer.Option(help="Steps of waiting, with commas.")] = "0.75,1.25,2,4",
    goodputs: Annotated[str, typer.Option(help="Tokens per second of the shorter steps.")] = "0.98,0.96,0.95,0.94",
    prompt_s: Annotated[float, typer.Option(help="Seconds that a token of a prompt takes.")] = 55e-6,
) -> None:
    """Print mean latency over that of the most tokens per second, by load and by what is borne."""
    machine = ProfiledMachine(read_document(profile).profile)
    numbers = [float(each) for each in steps.split(",")]
    print(f"| tokens/s of shorter steps | load | {' | '.join(f'{each:g} steps' for each in numbers)} |")
    print("|---|---|" + "---|" * len(numbers))
    for goodput in map(float, goodputs.split(",")):
        plans = with_shorter(machine, goodput, prompt_s)
        for load in LOADS:
            found = compare(plans, load, numbers)
            print(f"| {goodput:g} | {load:g} | {' | '.join(f'{each:.3f}' for each in found)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
