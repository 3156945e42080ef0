"""Parts of the scoreboard: each is one situation, played by the estimator and by constant arms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from speclen.bench.simulation import policy
from speclen.bench.simulation.learner import Constant, EstimatorLearner
from speclen.bench.simulation.scenarios import SCENARIOS
from speclen.bench.simulation.worlds import vllm_h200
from speclen.bench.simulation.worlds.own_h200 import OwnH200
from speclen.bench.simulation.worlds.play import World, best_arm, play
from speclen.bench.simulation.worlds.vllm_h200 import VllmH200
from speclen.records import Arm

H200: dict[str, Callable[[int, float], World]] = {"vllm-h200": VllmH200, "own-h200": OwnH200}
PROBE_STEPS = {"vllm-h200": vllm_h200.PROBE_STEPS, "own-h200": 3}
POLICY = tuple(SCENARIOS)
CONSTANTS = ("none", *(f"fixed:{length}" for length in range(1, 9)))
SEEDS = {"h200": 20, "policy": 8}
LOADS = (1, 2, 4, 8, 16)
SEED_0 = 1000  # no estimator was tuned on it
INF = float("inf")
NUM_CONSTANTS = 4  # constant arms that are played: those with the most true goodput over all batch sizes


@dataclass(frozen=True, slots=True)
class Job:
    """One seed of a part. seconds: of the worlds made from recordings."""

    part: str
    name: str
    seed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """By segment: the estimator's goodput and the best constant arm's, in percent of the oracle's."""

    seed: int
    scores: dict[str, tuple[float, float]]


def run(job: Job) -> Result:
    """Play a job in this process."""
    return Result(job.seed, {"h200": _h200, "policy": _policy}[job.part](job))


def _h200(job: Job) -> dict[str, tuple[float, float]]:
    def world() -> World:
        return H200[job.name](job.seed, job.seconds)

    limits = world().limits
    learned = play(world(), EstimatorLearner(limits, probe_steps=PROBE_STEPS[job.name]))
    constants = [play(world(), Constant(arm)) for arm in best_constants(world())]
    third = job.seconds / 3
    segments = {"all": (0.0, INF), "first 40 s": (0.0, 40.0), "after 40 s": (40.0, INF), "last third": (2 * third, INF)}
    return {
        name: (learned.percent(*segment), max(each.percent(*segment) for each in constants))
        for name, segment in segments.items()
    }


def best_constants(world: World) -> list[Arm]:
    """The arms with the most true goodput relative to the best of each load, best first."""
    found = dict.fromkeys(world.arms, 0.0)
    for batch_size in LOADS:
        best_s, best_tokens = world.expected(batch_size, best_arm(world, batch_size))
        for arm in found:
            seconds, tokens = world.expected(batch_size, arm)
            found[arm] += (tokens / seconds) / (best_tokens / best_s)
    return sorted(found, key=found.__getitem__, reverse=True)[:NUM_CONSTANTS]


def _policy(job: Job) -> dict[str, tuple[float, float]]:
    outcomes = policy.play(policy.Job(job.name, job.seed, ("adaptive", *CONSTANTS)))
    return {"all": (outcomes[0].score, max(each.score for each in outcomes[1:]))}


def rows_of(job: Job, results: Sequence[Result]) -> list[dict[str, Any]]:
    """Rows of the file: one a segment. against_constant: median of the ratio to the best constant arm of each seed."""
    rows = []
    for segment in results[0].scores:
        pairs = [result.scores[segment] for result in sorted(results, key=lambda each: each.seed)]
        scores = [score for score, _ in pairs]
        ratios = [100.0 * score / constant for score, constant in pairs]
        values = {"median": median(scores), "mean": fmean(scores), "worst": min(scores)}
        values |= {"against_constant": median(ratios), "worst_against_constant": min(ratios)}
        row: dict[str, Any] = {"part": job.part, "name": job.name, "segment": segment, "num_seeds": len(pairs)}
        row |= {key: round(value, 2) for key, value in values.items()}
        rows.append(row | {"scores": [round(score, 2) for score in scores]})
    return rows


def parts() -> list[tuple[str, str]]:
    """Names of all parts, by kind."""
    return [("h200", name) for name in H200] + [("policy", name) for name in POLICY]
