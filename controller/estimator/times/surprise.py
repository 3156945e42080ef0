"""What a group's reports say beyond what was believed, without slow steps.

A step may take long for any reason, but none takes less than it needs. So surprises are clipped, and what was cut off says
that the mean is elsewhere, but not where: such a report counts for as much less (Huber's weights).
"""

from __future__ import annotations

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.times import change

# Evidence of a cell up to which a step that is quicker than believed is believed, by at most this log time.
FEW_REPORTS, LARGEST_DROP = 3.0, 3.0
# Of a cell never seen before, what the first report counts for less: it may have been slow for being the first.
FIRST_OFF = 0.5
# Reports of a cell in one group whose median is the yardstick instead of what is believed.
OFTEN = 3
# Half of all surprises lie within so many standard deviations.
QUARTILE = 0.674


def clipped(
    surprise: FloatArray, width: FloatArray, alone: FloatArray, cell: np.ndarray, own: FloatArray
) -> tuple[FloatArray, FloatArray, float]:
    """Surprises without slow steps, what was left of each, and how many more than half of them lie beyond the quartiles.

    What was left is a share of its distance from the yardstick: of one that was not clipped, 1. width, alone: standard
    deviations of each, with the doubt of what is believed and without. own: evidence of the cells.
    """
    count = np.bincount(cell)
    mine, few, centre = count[cell], own < FEW_REPORTS, np.zeros(1)
    if np.maximum.reduce(mine) >= OFTEN:
        often, middle = mine >= OFTEN, np.add.accumulate(count)[cell] - mine + mine // 2
        centre = np.where(often, surprise[np.lexsort((surprise, cell))[middle]], 0.0)
        width, few = np.where(often, alone, width), few & ~often
    over, most = surprise - centre, change.LARGEST_Z * width
    outside = int(np.count_nonzero(np.abs(over) > QUARTILE * width)) - 0.5 * len(cell)
    kept = np.minimum(np.maximum(over, np.where(few, -LARGEST_DROP, -most)), most)
    return centre + kept, (np.abs(kept) + 1e-9) / (np.abs(over) + 1e-9), outside


def weight(left: FloatArray, own: FloatArray, alike: FloatArray) -> FloatArray:
    """What each report counts for. left: of its surprise, as `clipped` says; alike: steps of its cell in the group."""
    share: FloatArray = left * (1.0 - (own == 0.0) * (FIRST_OFF / alike))
    return share
