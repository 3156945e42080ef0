"""A replay of reports makes the same decisions, to the last bit."""

from __future__ import annotations

import numpy as np

from speclen.controller.analysis.replay import ContextAdded, GroupObserved, ProfileImported, replay
from speclen.controller.estimator import Estimator
from speclen.records import Arm, ContextKey, Decision, Limits, Profile, ProfileCell, StepFlag, StepRecord
from tests.support.world import World

KEY = ContextKey("t", "d", "cpu:test", "float32")
LIMITS, WIDER = Limits(16, 4), Limits(32, 4)


WORLD = World()


def step(seq: int, batch_size: int, arm: Arm, dice: np.random.Generator, flags: frozenset = frozenset()) -> StepRecord:
    length = arm.speculation_length
    return StepRecord(
        *(seq, batch_size, arm, *WORLD.draw(batch_size, length, dice), 100.0),
        flags=flags,
        num_drafted_sequences=batch_size if length else 0,
        num_verified_tokens=batch_size * (length + 1),
    )


def profile(factor: float = 1.3) -> Profile:
    """Of these steps, with drafting wrong by a factor."""
    cells = [
        ProfileCell(size, length, WORLD.step_s(size, length) * (factor if length else 1.0), 1e-5, 20)
        for size in (1, 4, 16)
        for length in range(5)
    ]
    return Profile(tuple(cells), tuple(WORLD.survival()[:4]), (400,) * 4)


def history(rounds: int = 40) -> tuple[list, list[tuple[int, Decision]]]:
    """Events of a controller whose context is widened half-way, and its decisions with the last group before each."""
    estimator, dice = Estimator(), np.random.default_rng(1)
    events = [ContextAdded(KEY, LIMITS), ProfileImported(KEY, profile())]
    made = [(0, each) for each in estimator.add_context(KEY, LIMITS) + estimator.seed_profile(KEY, profile())]
    for number in range(1, rounds + 1):
        if number == rounds // 2:
            events.append(ContextAdded(KEY, WIDER))
            made += [(number - 1, each) for each in estimator.add_context(KEY, WIDER)]
        size = (1, 4, 12)[number // 3 % 3]
        arm = estimator.table(KEY).arm_for(size) if number % 4 else Arm(number % 5)
        flags = frozenset({StepFlag.PREFILL}) if number % 9 == 0 else frozenset()
        group = [step(6 * number + n - 5, size, arm, dice, flags) for n in range(6)]
        made += [(number, each) for each in estimator.observe(KEY, group, "worker-1").decisions]
        estimator.take_probe(KEY, "worker-1", size, WIDER)  # leaves no trace in decisions
        events.append(GroupObserved(number, KEY, "worker-1", group))
    return events, made


def test_a_replay_makes_the_same_decisions():
    events, made = history()
    assert replay(events).decisions == made
    assert len(made) > 2
