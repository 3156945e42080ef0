"""What is known of plans as plain values, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from speclen.controller.estimator.plans.choice import PlanChoice
from speclen.controller.estimator.plans.plan import plan_from
from speclen.controller.estimator.plans.prediction import Walk
from speclen.controller.estimator.state import exported, restored


def exported_plans(plans: PlanChoice | None) -> Any:
    """None for workers that do not copy."""
    if plans is None:
        return None
    state: dict[str, Any] = exported(plans)
    return state | {
        "chosen": [None if plan is None else [*plan] for plan in plans.chosen],
        "news": plans.news,
        "walk": None if plans.walked is None else [exported(each) for each in plans.walked],
        "last": {worker: [*last] for worker, last in plans.last.items()},
        "readers": sorted(plans.readers),
    }


def restore_plans(plans: PlanChoice | None, state: Any) -> None:
    """Go on from exported plans, if the group's workers copy. KeyError, TypeError or ValueError where they are none."""
    if plans is None or state is None:
        return
    restored(plans, state)
    if not plans.sound or len(state["chosen"]) != len(plans.chosen):
        raise ValueError("it has plans that are none")
    if state["walk"] is not None:
        shapes = np.zeros(len(plans.grid)), np.zeros(len(plans.grid)), np.zeros((len(plans.grid), plans.mosts[-1]))
        plans.walked = Walk(*(restored(here, each) for here, each in zip(shapes, state["walk"], strict=True)))
    plans.last = {worker: plan_from(last) for worker, last in state["last"].items()}
    plans.readers = set(state["readers"])
    plans.restore(state["chosen"], bool(state["news"]))
