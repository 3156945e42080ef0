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

    profile: "own", "none", "other" (of another device but taken for this one's), "foreign" (of another device and known to
    be), "never" (step times x3 wherever drafting is on).
    """

    name: str
    title: str
    phases: tuple[Phase, ...] = (Phase(0.0),)
    profile: str = "own"
    loads: tuple[float, ...] = (0.03, 0.12, 0.3, 0.6, 0.95)
    max_batch: int = 32
    noise: float = 0.05
    slow_share: float = 0.01  # steps that take 5 to 20 times as long
    pause_share: float = 0.0  # steps with 100 to 400 ms on top
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
    faulty: str = ""  # what the last worker reports instead of the truth; see faulty.py
    faulty_from: float = 0.0  # share of the run after which it does
    faulty_rate: int = 1  # times that it reports every step


def _drop(factor: float) -> tuple[Phase, ...]:
    return (Phase(0.0), Phase(1 / 3, requests=lambda requests: requests.scaled(factor)), Phase(2 / 3))


def _slow_draft(factor: float) -> tuple[Phase, ...]:
    return (Phase(0.0), Phase(1 / 3, machine=lambda machine: machine.slower_draft(factor)), Phase(2 / 3))


def _faulty(name: str, title: str, kind: str, workers: int = 4, start: float = 0.0, rate: int = 1) -> Scenario:
    """Honest workers beside a faulty one; only the honest ones count."""
    return Scenario(name, title, num_workers=workers, delay_steps=8, faulty=kind, faulty_from=start, faulty_rate=rate)


_THROTTLED = (Phase(0.0), Phase(1 / 3, machine=lambda machine: machine.throttled(2.0)), Phase(2 / 3))


def _first_minute(name: str, title: str, profile: str) -> Scenario:
    """The first minute of a worker on two cores, about 1000 steps."""
    return Scenario(
        *(name, title),
        profile=profile,
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
    )


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
        Scenario("256", "batches up to 256", max_batch=256),
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
        Scenario("pauses", "pauses of 100-400 ms in 1% of steps", pause_share=0.01),
        Scenario("classes", "greedy and sampled requests, told apart", classes_reported=True, phases=_drop(0.6)),
        Scenario(
            *("unlike-2", "two workers, one 1.7 times slower with a slower draft"),
            num_workers=2,
            machines=(_same_machine, _other_device),
        ),
        _faulty("liar-times", "one of four reports wrong step times from the start", "times"),
        _faulty("liar-turns", "the same from the middle on, with wild times", "wild", start=0.5),
        _faulty("liar-all", "one of four reports that all is accepted, 16 times as often", "all", rate=16),
        _faulty("liar-none", "one of four reports that nothing is accepted, 16 times as often", "nothing", rate=16),
        _faulty("liar-of-2", "one of two reports that nothing is accepted, 16 times as often", "nothing", 2, rate=16),
        _faulty("liar-of-3", "one of three reports wrong step times, 16 times as often", "times", 3, rate=16),
        _first_minute("first-minute", "a CPU's first 1000 steps", "own"),
        _first_minute("first-minute-cold", "the same, no profile", "none"),
        _first_minute("first-minute-foreign", "the same, profile of another device", "foreign"),
    )
}


def hard_share_at(load: float, requests: Requests) -> float:
    """Share of hard requests among arrivals when the batch is that full."""
    return float(np.clip(requests.hard_share + 0.6 * (load - 0.4), 0.05, 0.95))
