"""Batch ranges, cells (batch range, arm), and what a step consists of."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import PlainSerializer, PlainValidator

from speclen.records import MAX_SPECULATION_LENGTH, Arm, Limits

MAX_ARMS = 2 * (MAX_SPECULATION_LENGTH + 1)
NUM_PARTS = 5  # features before the slopes: constant, sequences, drafting, draft passes, sequences in draft passes
FIRST_KNOT, NUM_SLOPES = 8, 11  # verified tokens up to which one slope holds; the last slope begins at 4,096
NUM_FEATURES = NUM_PARTS + NUM_SLOPES + 1
KNOTS = np.concatenate([[0.0], FIRST_KNOT * 2.0 ** np.arange(NUM_SLOPES - 1)])
WIDTHS = np.append(np.diff(KNOTS), np.inf)
# Prior of the weights in units of a plain step of one sequence, and the standard deviation of their logarithms. A draft
# model may take 1% or 50% of the target's time; a verified token 0.4% (H200) or 5% (CPU); held context perhaps nothing.
CONSTANT, DRAFTING, PASS, ONE, HELD = 0.85, 0.02, 0.08, 0.01, 1e-6  # ONE: a sequence, a drafted one, a verified token
CONSTANT_SD, WEIGHT_SD, SLOPE_CORRELATION = 0.3, 1.5, 0.8


def _pack(array: np.ndarray) -> tuple[str, tuple[int, ...], str]:
    return array.dtype.str, array.shape, base64.b64encode(array.tobytes()).decode()


def _unpack(value: Any) -> np.ndarray:
    """Raises ValueError unless this is an array of finite numbers."""
    try:
        dtype, shape, content = value
        array = np.frombuffer(base64.b64decode(content), {"<f8": float, "<i8": int}[dtype]).reshape(shape)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError("this is not an array") from error
    if not np.isfinite(array).all():
        raise ValueError("a number is not finite")
    return array.copy()


# Array that belongs to what is saved: in JSON, its bytes.
Array = Annotated[np.ndarray, PlainValidator(_unpack), PlainSerializer(_pack)]


def place_of(arm: Arm) -> int:
    """Index of an arm in arrays by arm. It does not depend on the limits."""
    return 2 * arm.speculation_length + arm.ngram


class Grid:
    """Batch ranges and arms within some limits. Larger limits add further ones and keep the indices of these.

    low, high: first and last batch size of each range; range_of: range of every batch size; sizes: a batch size of each
    range. arms: by place; allowed: True for those within the limits.
    """

    def __init__(self, limits: Limits, width: float) -> None:
        low = [1]
        while (following := low[-1] + max(1, int(low[-1] * width))) <= limits.max_batch_size:
            low.append(following)
        self.low = np.array(low)
        self.high = np.append(self.low[1:] - 1, limits.max_batch_size)
        self.range_of = np.searchsorted(low, np.arange(limits.max_batch_size + 1), side="right") - 1
        self.range_of[0] = 0
        self.sizes = (self.low + self.high) // 2
        self.arms = [
            Arm(length, bool(kind)) for length in range(limits.max_speculation_length + 1) for kind in range(2)
        ]
        self.shape = len(low), len(self.arms)
        self.lengths = np.repeat(np.arange(limits.max_speculation_length + 1), 2)
        self.allowed = self.within(limits)

    def within(self, limits: Limits) -> np.ndarray:
        """True for the arms within some limits, [arms]."""
        return np.array([arm.within(limits) == arm for arm in self.arms])


@dataclass(eq=False)
class Cells:
    """Cells with evidence. numbers: range * MAX_ARMS + place; features: of the first step in each, [cells, NUM_FEATURES]."""

    numbers: Array = field(default_factory=lambda: np.zeros(0, int))
    features: Array = field(default_factory=lambda: np.zeros((0, NUM_FEATURES)))

    def __post_init__(self) -> None:
        self._place = {number: at for at, number in enumerate(self.numbers.tolist())}
        self.ranges, self.places = np.divmod(self.numbers, MAX_ARMS)

    def find(self, numbers: np.ndarray, features: np.ndarray) -> np.ndarray:
        """Indices of the steps' cells, which are added where they are new. features: of the steps."""
        for at, number in enumerate(numbers.tolist()):
            if number not in self._place:
                self.numbers = np.append(self.numbers, number)
                self.features = np.vstack([self.features, features[at]])
                self.__post_init__()
        return np.array([self._place[number] for number in numbers.tolist()])


def features_of(columns: np.ndarray) -> np.ndarray:
    """[n, NUM_FEATURES] of steps.

    columns: sequences, draft passes, sequences in each, verified tokens, and tokens held per sequence, [5, n].
    """
    batch, passes, drafted, verified, context = columns
    features = np.empty((len(batch), NUM_FEATURES))
    features[:, 0], features[:, 1], features[:, 2], features[:, 3] = 1.0, batch, passes > 0, passes
    features[:, 4], features[:, -1] = passes * drafted, batch * context
    features[:, NUM_PARTS:-1] = np.minimum(np.maximum(verified[:, None] - KNOTS, 0.0), WIDTHS)
    return features


def _prior_precision() -> np.ndarray:
    alike, at, slopes = np.eye(NUM_FEATURES), np.arange(NUM_SLOPES), slice(NUM_PARTS, NUM_PARTS + NUM_SLOPES)
    alike[slopes, slopes] = SLOPE_CORRELATION ** np.abs(at[:, None] - at)
    spread = np.array([CONSTANT_SD, *[WEIGHT_SD] * (NUM_FEATURES - 1)])
    precision: np.ndarray = np.linalg.inv(alike * np.outer(spread, spread))
    return precision


# Gaussian prior of phi, the log weights, before anything was seen.
PRIOR_MEAN = np.log([CONSTANT, ONE, DRAFTING, PASS, *[ONE] * (1 + NUM_SLOPES), HELD])
PRIOR_PRECISION = _prior_precision()


def shares(features: np.ndarray, phi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log of the surface, [n], and its gradient by phi, [n, NUM_FEATURES]: the share of each part in the whole."""
    parts = features * np.exp(phi)
    total = parts.sum(axis=1)
    return np.log(total), parts / total[:, None]
