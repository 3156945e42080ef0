"""The situations in which policies are compared. Names are what `--scenario` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from speclen.bench.simulation import vllm_h200
from speclen.bench.simulation.own_h200 import Machine, OwnH200, Stage, Truth
from speclen.bench.simulation.texts import EASY_SHARE, MAX_BATCH, MAX_LENGTH, Outputs
from speclen.records import Arm, Profile, ProfileCell

RECORDED = Machine()
SLOW_DRAFT = RECORDED.slower(3.0, "pass_s", "drafting_s")
THROTTLED = RECORDED.slower(2.0, "row_s", "pass_s", "drafting_s", "token_s")
CPU = Machine(0.012, 0.001, 0.0012, 0.0, 0.002)
PROFILED_SIZES = (1, 2, 4, 8, MAX_BATCH)

World = OwnH200 | vllm_h200.VllmH200  # a simulated worker; now_s: when its next step starts
Worlds = tuple[World, ...]


class Scenario(NamedTuple):
    """A situation. worlds: a worker each, by seed and seconds; profile: of the controller, given the first world's outputs.

    last_is_faulty: the last worker reports falsely.
    """

    title: str
    worlds: Callable[[int, float], Worlds]
    profile: Callable[[Outputs], Profile] | None = None
    last_is_faulty: bool = False
    probe_steps: int = 3


def own(*machines: Machine) -> Callable[[int, float], Worlds]:
    """A worker on each machine."""

    def worlds(seed: int, seconds: float) -> Worlds:
        stages = ((Stage(0.0, machine),) for machine in machines)
        return tuple(OwnH200(seed + 1_000_000 * at, seconds, mine) for at, mine in enumerate(stages))

    return worlds


def changed(machine: Machine, easy_share: float = EASY_SHARE) -> Callable[[int, float], Worlds]:
    """A worker whose machine or requests change in the middle third of the time."""
    stages = Stage(0.0, RECORDED), Stage(1 / 3, machine, easy_share), Stage(2 / 3, RECORDED)
    return lambda seed, seconds: (OwnH200(seed, seconds, stages),)


def profile(machine: Machine, factor: float = 1.0) -> Callable[[Outputs], Profile]:
    """A profile as `speclen profile run` would measure it. factor: on the times of all steps that draft."""

    def of(outputs: Outputs) -> Profile:
        truth = Truth(machine, outputs)
        cells = tuple(
            ProfileCell(batch, length, truth.expected(batch, Arm(length))[0] * (factor if length else 1.0), 0.0, 20)
            for batch in PROFILED_SIZES
            for length in range(MAX_LENGTH + 1)
        )
        return Profile(cells, outputs.survival(MAX_LENGTH), (4000,) * MAX_LENGTH, "simulated")

    return of


SCENARIOS = {
    "vllm-h200": Scenario(
        "vLLM with a draft model on an H200, from recordings",
        lambda seed, seconds: (vllm_h200.VllmH200(seed, seconds),),
        probe_steps=vllm_h200.PROBE_STEPS,
    ),
    "own-h200": Scenario("speclen's engine on an H200, from recordings", own(RECORDED)),
    "profiled": Scenario("the same with a profile", own(RECORDED), profile(RECORDED)),
    "other-hardware": Scenario("with a profile of another device", own(RECORDED), profile(SLOW_DRAFT)),
    "never": Scenario('with a profile that says "never draft"', own(RECORDED), profile(RECORDED, 3.0)),
    "cpu": Scenario("a device on which verified tokens cost", own(CPU)),
    "throttled": Scenario("device twice as slow, and back", changed(THROTTLED)),
    "slow-draft": Scenario("draft three times as slow, and back", changed(SLOW_DRAFT)),
    "acceptance": Scenario("all requests become hard, and back", changed(RECORDED, 0.0)),
    "unlike": Scenario("two workers, one with a slower draft", own(RECORDED, SLOW_DRAFT)),
    "liar": Scenario("one of four reports that all is accepted", own(*[RECORDED] * 4), last_is_faulty=True),
}
