"""Whether the draft model works at all changes seldom: where a table's neighbouring batch sizes are of two minds.

Batches grow and shrink by a row from step to step. Where plans of neighbouring sizes draft and do not, the draft model would
catch up with all rows again and again, which takes longer than either plan is better at its size.
"""

from __future__ import annotations

from dataclasses import replace

from speclen.worker.drafting.plan import Plan
from speclen.worker.reporting.length_table import LengthTable

# Steps that were to draft, after those that were not, or the other way round: by so many more than went on as before.
CONTRARY_STEPS = 12
FAR = 3  # steps that one counts for of which no size near it would go on as before: the load has changed
# Plans of batch sizes within this part of the present one are nearly as good there: of the next one at least.
NEAR = 0.125


class SteadyDrafts:
    """Picks plans from tables, and goes on with or without drafts until most steps of late were to do otherwise."""

    def __init__(self) -> None:
        self._drafts = True
        self._contrary = 0  # steps that were to do otherwise, less those that were not

    def plan_for(self, table: LengthTable, batch_size: int, rows_by_class: tuple[int, ...]) -> Plan:
        """The table's plan for these rows or, to go on, a neighbouring size's. As a last resort one without its drafts."""
        plan = table.plan_for(batch_size, rows_by_class)
        if bool(plan.draft_length) == self._drafts:
            self._contrary = max(self._contrary - 1, 0)
            return plan
        # What a mix of classes asks for hangs on whose rows these are: a plan for the usual mix says nothing about it.
        near = self._near(table, batch_size) if plan is table.plans[batch_size] else None
        self._contrary += 1 if near is not None else FAR
        if self._contrary >= CONTRARY_STEPS:
            self._drafts, self._contrary = not self._drafts, 0
            return plan
        if near is not None:
            return near
        return plan if self._drafts else replace(plan, draft_length=0, draft_after_copy=False)

    def _near(self, table: LengthTable, batch_size: int) -> Plan | None:
        """The plan of the nearest size that goes on as before."""
        for distance in range(1, max(1, int(NEAR * batch_size)) + 1):
            for size in (batch_size - distance, batch_size + distance):
                if 0 < size < len(table.plans) and bool(table.plans[size].draft_length) == self._drafts:
                    return table.plans[size]
        return None
