"""Lengths in use: the configured ones until a controller's rest on evidence, and only those that run at full speed."""

from __future__ import annotations

from collections.abc import Set

from speclen.records import Arm, StepRecord
from speclen.worker.drafting.arm_chooser import ArmChoice
from speclen.worker.reporting.table import ArmTable

MIN_SAMPLES = 20  # of a batch size or one near it, before the controller's length is used there
NEAR = 2  # sizes within one in so many tell of each other
FLAGGED = 0.3  # samples that a step with flags counts for: where requests arrive all the time, most steps have prompts


class CautiousLengths:
    """Replaces a controller's choices at batch sizes without evidence, and lengths that run slower than others.

    configured: the lengths that vLLM would use. fast: lengths that may be chosen; all if empty.
    """

    def __init__(self, configured: ArmTable, fast: Set[int] = frozenset()) -> None:
        self.configured = configured
        self.fast = fast
        self._own = [0.0] * len(configured.arms)  # samples by batch size
        self._samples = self._own.copy()  # those of neighbours included

    def note(self, step: StepRecord) -> None:
        """Count a reported step, until its batch size has enough for its neighbours, too: a batch may have hundreds."""
        own = min(step.batch_size, len(self._own) - 1)
        if self._own[own] >= MIN_SAMPLES:
            return
        weight, reach = FLAGGED if step.flags else 1.0, max(1, own // NEAR)
        self._own[own] += weight
        for size in range(max(1, own - reach), min(own + reach, len(self._samples) - 1) + 1):
            self._samples[size] += weight

    def choice(self, batch_size: int, wanted: ArmChoice) -> ArmChoice:
        """The choice to use in place of the controller's. Probes are followed, since evidence begins with them."""
        if not wanted.probe_id and self._samples[batch_size] < MIN_SAMPLES:
            return ArmChoice(self.configured.arms[batch_size])
        length = wanted.arm.speculation_length
        if not self.fast or length in self.fast:
            return wanted
        nearest = min(self.fast, key=lambda each: (abs(each - length), each))
        return wanted._replace(arm=Arm(nearest))
