"""Simulated worlds in which policies are compared: their true values, and random draws for a seed.

Everything random is drawn beforehand: load and level by time, noise by step number, requests by order of arrival.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from math import log2
from typing import NamedTuple

import numpy as np

from speclen.bench.simulation.level import NUM_DRAWN, AnyLoad, Noise, Sweep
from speclen.bench.simulation.machines import AnyMachine, Machine
from speclen.bench.simulation.texts import Outputs, Texts
from speclen.records import Arm, Limits, Profile, ProfileCell

NUM_REQUESTS = 4096  # with random outputs; further ones repeat them
LONG_LENGTH = 4
STALL_S = 0.3
PROFILED_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHORT_SHARE = 0.014  # of steps on vLLM whose result arrives right after the previous one, since the queue ran empty


class Stage(NamedTuple):
    """A change of a world. start: share of the time before it. machine, texts: None: those of the world."""

    start: float
    machine: AnyMachine | None = None
    texts: Texts | None = None


class Clock(NamedTuple):
    """Errors in the times that a worker reports.

    late: share of a step's time that is reported with the next step. long_factor: on latency_s of steps with at least
    LONG_LENGTH draft tokens; their elapsed_s is true. stalled: share of steps in which the host stops for STALL_S.
    """

    late: float = 0.0
    long_factor: float = 1.0
    stalled: float = 0.0


class World(NamedTuple):
    """A situation in which policies are compared.

    machines: one per worker. profile: factor on the times of steps that draft in the offline profile, None for no profile.
    evaluated: share of finished outputs that are evaluated for every arm, others for n-grams alone; None for no evaluation.
    flagged: share of steps that prefill a chunk of a prompt. transition: relative extra time of the
    first steps after a change of arm. first_use_s: time to compile a batch size and arm, not scored. lost: share of
    lost reports; late_s: delay of the others. overlapped: reports and prefill are as in vLLM. last_is_faulty: the last
    worker reports 16 times as often that everything was accepted, and is not scored.
    """

    title: str
    machines: tuple[AnyMachine, ...] = (Machine(),)
    stages: tuple[Stage, ...] = ()
    texts: Texts = Texts()
    limits: Limits = Limits(16, 8, ngram=True)
    load: AnyLoad = Sweep((1, 2, 4, 8, 16), (3.0, 5.0))
    noise: Noise = Noise()
    seconds: float = 90.0
    profile: float | None = None
    evaluated: float | None = 0.12
    flagged: float = 0.0
    transition: tuple[float, ...] = ()
    first_use_s: float = 0.0
    lost: float = 0.0
    late_s: float = 0.0
    clock: Clock = Clock()
    overlapped: bool = False
    last_is_faulty: bool = False

    @property
    def probe_steps(self) -> int:
        """Steps of a probe, as requested by this kind of worker."""
        return 5 if self.overlapped else 4 + len(self.transition) if self.transition else 3


class Truth:
    """Expected seconds and tokens of every arm, and the best arm, by batch size and context length."""

    def __init__(self, machine: AnyMachine, outputs: Outputs, noise: Noise) -> None:
        self.machine, self.outputs, self.noise = machine, outputs, noise
        steps, drafting, verified = outputs.walks.sum(axis=2)
        self.tokens = (outputs.num_tokens.sum() / steps).tolist()
        self._shares = list(zip(outputs.arms, (drafting / steps).tolist(), (verified / steps).tolist(), strict=True))
        self._known: dict[tuple[int, int], tuple[list[float], list[float]]] = {}

    def at(self, batch_size: int, context: float) -> tuple[list[float], list[float]]:
        """Expected seconds of a step of every arm, and its goodput relative to the best arm's."""
        key = batch_size, round(8 * log2(context)) if self.machine.context_s else 56
        if key not in self._known:
            seconds = [self._step_s(batch_size, 2 ** (key[1] / 8), *each) for each in self._shares]
            goodput = [tokens / step_s for tokens, step_s in zip(self.tokens, seconds, strict=True)]
            self._known[key] = seconds, [each / max(goodput) for each in goodput]
        return self._known[key]

    def _step_s(self, batch: int, context: float, arm: Arm, drafting: float, verified: float) -> float:
        some = 1.0 - (1.0 - drafting) ** batch  # probability that any sequence drafts
        passes = arm.speculation_length * some
        seconds = self.machine.step_s(batch, drafting * batch, passes, verified * batch, context)
        return seconds * (1.0 + some * (self.noise.draft_factor - 1.0) * bool(passes))

    def best_arm(self, batch_size: int, context: float = 128.0) -> Arm:
        """The oracle's arm: the one with the most expected tokens per second."""
        return self.outputs.arms[int(np.argmax(self.at(batch_size, context)[1]))]


class Scene:
    """A world drawn for one seed. Running it does not change it."""

    def __init__(self, world: World, seed: int, seconds: float | None = None) -> None:
        self.world, self.seconds = world, seconds or world.seconds
        rng = np.random.default_rng([seed, 23])
        stages = (Stage(0.0), *world.stages)
        kinds = {texts: Outputs(rng, texts, world.limits) for texts in (each.texts or world.texts for each in stages)}
        self.starts = [stage.start * self.seconds for stage in stages]
        self.workers = [
            Site(
                self,
                [Truth(each.machine or own, kinds[each.texts or world.texts], world.noise) for each in stages],
                seed,
                at,
            )
            for at, own in enumerate(world.machines)
        ]

    def profile(self) -> Profile | None:
        """The offline profile of the first worker, as `speclen profile run` would measure it."""
        return None if self.world.profile is None else self.profile_of(self.world.profile)

    def profile_of(self, factor: float) -> Profile:
        """The profile of the first worker. factor: on the times of steps that draft."""
        truth, limits = self.workers[0].truths[0], self.world.limits
        lengths = range(limits.max_speculation_length + 1)
        sizes = [size for size in PROFILED_SIZES if size < limits.max_batch_size] + [limits.max_batch_size]
        context, tokens = float(truth.outputs.prompts.mean()), truth.tokens[: len(lengths)]
        survival = tuple(more - less for less, more in pairwise(tokens))
        cells = tuple(
            ProfileCell(size, length, truth.at(size, context)[0][length] * (factor if length else 1.0),
                        0.01 * truth.at(size, context)[0][length], 20, context)
            for size in sizes for length in lengths
        )  # fmt: skip
        return Profile(cells, survival, (4000,) * len(survival), "simulated")

    def best_constant(self) -> Arm:
        """The single arm with the highest goodput over the whole time."""
        share = np.zeros(len(self.workers[0].truths[0].outputs.arms))
        for site in self.workers:
            for now_s in np.arange(0.0, self.seconds, self.seconds / 500):
                truth = site.truths[bisect_right(self.starts, now_s) - 1]
                context = float(truth.outputs.prompts.mean())
                share += truth.at(site.load.sizes[site.load.index_at(now_s)], context)[1]
        return self.workers[0].truths[0].outputs.arms[int(share.argmax())]


class Site:
    """One worker of a scene: its load, level, noise and requests, drawn beforehand."""

    def __init__(self, scene: Scene, truths: list[Truth], seed: int, number: int) -> None:
        world, rng = scene.world, np.random.default_rng([seed, 24, number])
        self.world, self.truths, self.starts, self.seconds = world, truths, scene.starts, scene.seconds
        self.name = f"worker-{number}"
        self.load = world.load.draw(rng, scene.seconds)
        self.level = world.noise.level(rng, scene.seconds, self.load.starts)
        self.plain, self.drafting = world.noise.of_steps(rng)
        self.requests = rng.integers(0, 1 << 30, NUM_REQUESTS)
        chances = rng.random((4, NUM_DRAWN))
        self.prefills, self.lost, self.ran_empty = (
            chances[:3] < [[world.flagged], [world.lost], [SHORT_SHARE]]
        ).tolist()
        self.chances = chances[3].tolist()
        self.stalls = (rng.random(NUM_DRAWN) < world.clock.stalled).tolist()
