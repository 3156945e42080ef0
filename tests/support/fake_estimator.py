"""An estimator that counts: the whole interface, no statistics, and failures on demand."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass
class Known:
    """One context: the arm in use is the one of the newest step."""

    limits: Limits
    arm: Arm = PLAIN
    version: int = 1
    num_steps: Counter[Arm] = field(default_factory=Counter)


class FakeEstimator:
    """fail: names of methods that raise. probes: whether every call of take_probe gives one. calls: (context, seqs, worker)
    of every observe."""

    def __init__(self) -> None:
        self.fail: set[str] = set()
        self.probes = False
        self.calls: list[tuple[ContextKey, list[int], str]] = []
        self.isolated: set[str] = set()
        self._known: dict[ContextKey, Known] = {}
        self._num_probes = 0

    def _reach(self, name: str) -> None:
        if name in self.fail:
            raise ZeroDivisionError(f"{name} fails for a test")

    @property
    def contexts(self) -> tuple[ContextKey, ...]:
        return tuple(self._known)

    def knows(self, key: ContextKey) -> bool:
        return key in self._known

    def limits(self, key: ContextKey) -> Limits:
        return self._known[key].limits

    def add_context(self, key: ContextKey, limits: Limits) -> list[Decision]:
        known = self._known.setdefault(key, Known(limits))
        known.limits = known.limits.widened(limits)
        return []

    def observe(self, key: ContextKey, records: Sequence[StepRecord], worker_id: str = "") -> Outcome:
        self._reach("observe")
        known = self._known[key]
        self.calls.append((key, [step.seq for step in records], worker_id))
        known.num_steps.update(step.arm for step in records)
        return Outcome(self._choose(key, records[-1].arm), [])

    def _choose(self, key: ContextKey, arm: Arm) -> list[Decision]:
        known = self._known[key]
        if arm == known.arm:
            return []
        before, known.arm, known.version = known.arm, arm, known.version + 1
        return [
            Decision(key, 1, known.limits.max_batch_size, known.version, before, arm, 11.0, 10.0, "it is the newest")
        ]

    def table(self, key: ContextKey, worker_id: str = "") -> Table:
        known = self._known[key]
        return Table(known.version, (Choice(1, known.limits.max_batch_size, known.arm, 10.0),))

    def take_probe(
        self,
        key: ContextKey,
        worker_id: str = "",
        batch_size: int | None = None,
        limits: Limits | None = None,
        num_steps: int = 3,
    ) -> Probe | None:
        self._reach("take_probe")
        if not self.probes:
            return None
        self._num_probes += 1
        return Probe(self._num_probes, batch_size or 1, batch_size or 1, Arm(1), num_steps)

    def seed_profile(self, key: ContextKey, profile: Profile) -> list[Decision]:
        return self._choose(key, Arm(max(cell.speculation_length for cell in profile.cells)))

    def rows(self, key: ContextKey) -> list[ArmEstimate]:
        self._reach("rows")
        known = self._known[key]
        most = known.limits.max_batch_size
        return [
            ArmEstimate(1, most, arm, 2.0, 0.02, 10.0, 9.0, 11.0, number, 0.02, "online", arm == known.arm)
            for arm, number in sorted(known.num_steps.items())
        ]

    def survival(self, key: ContextKey) -> list[tuple[float, float]]:
        return [(0.5, 10.0)]

    def is_isolated(self, key: ContextKey, worker_id: str) -> bool:
        return worker_id in self.isolated

    def num_isolated(self, key: ContextKey) -> int:
        return len(self.isolated)

    def start_anew(self, key: ContextKey, reason: str) -> Outcome:
        self._reach("start_anew")
        self._known[key].num_steps.clear()
        return Outcome([], [DriftEvent(key, "reset", 1.0, reason)])

    def save(self, key: ContextKey) -> bytes:
        self._reach("save")
        known = self._known[key]
        return json.dumps([known.limits, known.arm, known.version, list(known.num_steps.items())]).encode()

    def restore(self, key: ContextKey, state: bytes) -> None:
        assert key in self._known
        limits, arm, version, steps = json.loads(state)
        counts = Counter({Arm(*each): number for each, number in steps})
        self._known[key] = Known(Limits(*limits), Arm(*arm), version, counts)
