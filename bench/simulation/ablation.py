"""What each piece of the estimator is worth: it is played with one piece switched off at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest.mock import patch

from speclen.controller.estimator import acceptance, choice
from speclen.controller.estimator.contexts import workers
from speclen.controller.estimator.times import change, speed, step_time, surface, surprise

NEVER = 1e12  # of a threshold, and a prior that nothing moves
SWITCHED_OFF: dict[str, tuple[tuple[ModuleType, str, float], ...]] = {
    "cells on top of the surface": tuple((step_time, f"{name}CELL_SD", 1e-4) for name in ("", "LEAST_", "MOST_")),
    "how far cells are from the surface": ((step_time, "LEAST_CELL_SD", 0.04), (step_time, "MOST_CELL_SD", 0.04)),
    "new cells say little of the speed": ((step_time, "UNSEEN_SDS", 0.0), (step_time, "UNSEEN_SD", 0.0)),
    "quick steps of new cells unclipped": ((surprise, "FEW_REPORTS", 0.0),),
    "first reports that count for half": ((surprise, "FIRST_OFF", 0.0),),
    "evidence of other contexts as a prior": ((step_time, "CONTEXT_LEFT", NEVER),),
    "cells that outlive a change": ((step_time, "KEPT_LEFT_OVER", 0.0),),
    "ageing of cells": ((step_time, "WALK", 0.0),),
    "slopes that resemble their neighbours": ((surface, "SLOPE_RESEMBLANCE", 0.0),),
    "clipped surprises": ((change, "LARGEST_Z", 1e3),),
    "tilt of longer lengths": ((change, "TILT_THRESHOLD", NEVER),),
    "wandering speed": tuple((speed, f"{name}_SD", 1e-6) for name in ("START", "LEAST", "MOST")),
    "a speed that stays away": ((speed, "LEAST_AWAY", NEVER),),
    "jumps of the speed": ((speed, "JUMP", NEVER),),
    "change of acceptance": ((acceptance, "THRESHOLD", NEVER),),
    "bands of load": ((acceptance, "BAND_PRIOR_ROWS", NEVER),),
    "classes of requests": ((acceptance, "CLASS_PRIOR_ROWS", NEVER), (acceptance, "BAND_PRIOR_ROWS", NEVER)),
    "a doubtful time counts as longer": ((choice, "RISK", 0.0),),
    "margin of a change": ((choice, "MARGIN", 0.0),),
    "probes where drafting is on": ((choice, "SHARE", 0.0),),
    "probes at length 0": ((choice, "SHARE_AT_ZERO", 0.0), (choice, "CAP_STEPS_AT_ZERO", 0.0)),
    "second step of a probe at 0": ((choice, "KNOWN_SD", NEVER), (choice, "KNOWN_REPORTS", 0.0)),
    "workers compared by step times": ((workers, "UNLIKE_TIMES", NEVER), (workers, "UNLIKE_FACTOR", NEVER)),
    "workers compared by acceptance": ((workers, "UNLIKE_ACCEPTANCE", NEVER),),
    "no more say for who sends more": ((workers, "LEAST_WEIGHT", 1.0),),
}


@contextmanager
def without(piece: str) -> Iterator[None]:
    """Play without a piece; "" for nothing off."""
    with ExitStack() as stack:
        for module, name, value in SWITCHED_OFF[piece] if piece else ():
            stack.enter_context(patch.object(module, name, value))
        yield
