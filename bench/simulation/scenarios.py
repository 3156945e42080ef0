"""The situations in which policies are compared, each a change to one world. Names are what `--scenario` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from speclen.bench.simulation.world import Machine, Requests


def _same_machine(machine: Machine) -> Machine:
    return machine


def _same_requests(requests: Requests) -> Requests:
    return requests


def _other_device(machine: Machine) -> Machine:
    return machine.slower(1.7).slower_draft(2.5)


@dataclass(frozen=True)
class Phase:
    """From this share of the run on, the world differs so from the one at the start."""

    start: float
    machine: Callable[[Machine], Machine] = _same_machine
    requests: Callable[[Requests], Requests] = _same_requests


@dataclass(frozen=True)
class Scenario:
    """One situation. Loads are shares of max_batch that a phase of arrivals keeps busy on average.

    profile: "own", "none", "other" (of another device but taken for this one's), "never" (step times x3 wherever drafting
    is on).
    """

    name: str
    title: str
    phases: tuple[Phase, ...] = (Phase(0.0),)
    profile: str = "own"
    loads: tuple[float, ...] = (0.03, 0.12, 0.3, 0.6, 0.95)
    max_batch: int = 32
    noise: float = 0.05
    slow_share: float = 0.01  # steps that take 5 to 20 times as long
    wander: float = 0.0  # log-sd per 1000 steps of a slow random drift of draft and verify times
    neighbour: float = 1.0  # steps take this many times as long while a neighbour uses the device, a third of the time
    bump: float = 0.03
    cliff: bool = False
    steady_batch: int = 0  # batch size that hardly moves; 0: follow the queue
    hard_with_load: bool = False  # hard requests come when it is busy
    num_workers: int = 1
    delay_steps: int = 0  # steps of the whole fleet that pass before a group of reports arrives
    device: str = "accelerator"  # "cpu": no knee to speak of, large bumps; see world.py
    run_share: float = 1.0  # of the steps asked for
    phase_steps: int = 750  # arrivals change their rate and burstiness this often
    mean_new_tokens: float = 96.0
    engine_flags: bool = False  # steps with prefill, first uses and catch-up steps are flagged, and take longer
    classes_reported: bool = False  # reports tell the two classes of requests apart
    machines: tuple[Callable[[Machine], Machine], ...] = ()  # of each worker, where they are not alike
    faulty_rate: int = 0  # the last worker reports so often that all of a step was accepted; 0: it reports the truth


def _drop(factor: float) -> tuple[Phase, ...]:
    return (Phase(0.0), Phase(1 / 3, requests=lambda requests: requests.scaled(factor)), Phase(2 / 3))


def _slow_draft(factor: float) -> tuple[Phase, ...]:
    return (Phase(0.0), Phase(1 / 3, machine=lambda machine: machine.slower_draft(factor)), Phase(2 / 3))


_THROTTLED = (Phase(0.0), Phase(1 / 3, machine=lambda machine: machine.throttled(2.0)), Phase(2 / 3))


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("stationary", "stationary"),
        Scenario("cold", "cold start, no profile", profile="none"),
        Scenario("throttled", "device twice as slow, and back", phases=_THROTTLED),
        Scenario("steady-x3", "steady batch near 4, draft x3 and back", phases=_slow_draft(3.0), steady_batch=4),
        Scenario("acceptance", "acceptance halves, and back", phases=_drop(0.5)),
        Scenario("other-hardware", "profile of other hardware", profile="other"),
        Scenario("never", 'profile says "never speculate"', profile="never"),
        Scenario(
            "tails", "slow steps x5, noise 10%, drift", phases=_drop(0.6), noise=0.10, slow_share=0.05, wander=0.05
        ),
        Scenario("neighbour", "a neighbour slows the device by half, on and off", noise=0.12, neighbour=1.5),
        Scenario("cliffs", "8% bumps and a latency cliff, no profile", profile="none", bump=0.08, cliff=True),
        Scenario(
            *("correlated", "acceptance falls with load, 8 stale workers"),
            hard_with_load=True,
            num_workers=8,
            delay_steps=50,
        ),
        Scenario("classes", "greedy and sampled requests, told apart", classes_reported=True, phases=_drop(0.6)),
        Scenario(
            *("unlike-2", "two workers, one 1.7 times slower with a slower draft"),
            num_workers=2,
            machines=(_same_machine, _other_device),
        ),
        Scenario(
            *("liar-all", "one of four reports that all is accepted, 16 times as often"),
            num_workers=4,
            delay_steps=8,
            faulty_rate=16,
        ),
        Scenario(
            *("first-minute-cold", "a CPU's first 1000 steps, about a minute, no profile"),
            profile="none",
            loads=(0.05, 0.15, 0.5, 0.9),
            max_batch=16,
            noise=0.1,
            slow_share=0.005,
            neighbour=1.4,
            bump=0.06,
            device="cpu",
            run_share=1 / 12,
            phase_steps=100,
            mean_new_tokens=64.0,
            engine_flags=True,
        ),
    )
}


def hard_share_at(load: float, requests: Requests) -> float:
    """Share of hard requests among arrivals when the batch is that full."""
    return float(np.clip(requests.hard_share + 0.6 * (load - 0.4), 0.05, 0.95))
