"""Estimators that count: the interface that the controller uses, no statistics, and failures on demand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from speclen.controller.estimator import Outcome
from speclen.records import (
    PLAIN,
    Arm,
    ArmEstimate,
    Choice,
    ContextKey,
    Decision,
    DriftEvent,
    Limits,
    Probe,
    Profile,
    StepRecord,
    Table,
)


class FakeEstimator:
    """The arm in use is the one of the newest step if it follows them. shared: tells what fails."""

    first_survival = ()

    def __init__(
        self, shared: FakeEstimators, key: ContextKey, limits: Limits, arm: Arm = PLAIN, follows: bool = True
    ) -> None:
        self.shared, self.key, self.limits, self.follows = shared, key, limits, follows
        self.arm, self.version, self.num_steps = arm, 1, Counter[Arm]()

    def observe(self, records: Sequence[StepRecord], worker: str = "") -> Outcome:
        self.shared.reach("observe")
        self.num_steps.update(step.arm for step in records)
        return Outcome(self._choose(records[-1].arm), [])

    def _choose(self, arm: Arm) -> list[Decision]:
        if arm == self.arm or not self.follows:
            return []
        before, self.arm, self.version = self.arm, arm, self.version + 1
        most = self.limits.max_batch_size
        return [Decision(self.key, 1, most, self.version, before, arm, 11.0, 10.0, "it is the newest")]

    def table(self, worker: str = "") -> Table:
        return Table(self.version, (Choice(1, self.limits.max_batch_size, self.arm, 10.0),))

    def probe(self, worker: str, batch_size: int, limits: Limits, num_steps: int) -> Probe | None:
        self.shared.reach("probe")
        if not self.shared.probes:
            return None
        self.shared.num_probes += 1
        return Probe(self.shared.num_probes, batch_size, batch_size, Arm(1), num_steps)

    def seed(self, profile: Profile) -> list[Decision]:
        return self._choose(Arm(max(cell.speculation_length for cell in profile.cells)))

    def rows(self) -> list[ArmEstimate]:
        self.shared.reach("rows")
        most = self.limits.max_batch_size
        return [
            ArmEstimate(1, most, arm, 2.0, 0.02, 10.0, 9.0, 11.0, number, 0.02, "online", arm == self.arm)
            for arm, number in sorted(self.num_steps.items())
        ]

    def survival(self) -> list[tuple[float, float]]:
        return [(0.5, 10.0)]

    def is_isolated(self, worker: str) -> bool:
        return worker in self.shared.isolated

    @property
    def num_isolated(self) -> int:
        return len(self.shared.isolated)

    def save(self) -> bytes:
        self.shared.reach("save")
        return json.dumps([self.limits, self.arm, self.version, list(self.num_steps.items())]).encode()

    def restore(self, state: bytes) -> None:
        limits, arm, version, steps = json.loads(state)
        self.limits, self.arm, self.version = Limits(*limits), Arm(*arm), version
        self.num_steps = Counter({Arm(*each): number for each, number in steps})


class FakeEstimators(dict[ContextKey, FakeEstimator]):
    """fail: names of methods that raise. probes: whether every call of probe gives one."""

    def __init__(self) -> None:
        super().__init__()
        self.fail: set[str] = set()
        self.probes, self.num_probes = False, 0
        self.isolated: set[str] = set()

    def reach(self, name: str) -> None:
        if name in self.fail:
            raise ZeroDivisionError(f"{name} fails for a test")

    def add(self, key: ContextKey, limits: Limits) -> list[Decision]:
        known = self.setdefault(key, FakeEstimator(self, key, limits))
        known.limits = known.limits.widened(limits)
        return []

    def reset(self, key: ContextKey, reason: str) -> Outcome:
        self.reach("reset")
        self[key].num_steps.clear()
        return Outcome([], [DriftEvent(key, "reset", 1.0, reason)])
