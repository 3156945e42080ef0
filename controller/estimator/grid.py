"""Batch ranges, cells (batch range, arm), and what a step consists of."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from pydantic import PlainSerializer, PlainValidator

from speclen.records import Arm, Limits

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
        array = np.frombuffer(base64.b64decode(content), {"<f8": float, "<i8": int, "|b1": bool}[dtype]).reshape(shape)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError("this is not an array") from error
    if not np.isfinite(array).all():
        raise ValueError("a number is not finite")
    return array.copy()


# Array that belongs to what is saved: in JSON, its bytes.
Array = Annotated[np.ndarray, PlainValidator(_unpack), PlainSerializer(_pack)]


class Grid:
    """Batch ranges, and the cells of a context by number: (range, n-grams or not, length).

    low, high: first and last batch size of each range; range_of: range of every batch size; sizes: a batch size of each
    range; shape: [ranges, 2, lengths]. The last two dimensions flattened are the place of an arm.
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
        self.num_lengths = limits.max_speculation_length + 1
        self.shape = (len(low), 2, self.num_lengths)
        self.num_arms = 2 * self.num_lengths
        self.arms = [Arm(length, bool(ngram)) for ngram in range(2) for length in range(self.num_lengths)]
        self.allowed = self.within(limits)

    def within(self, limits: Limits) -> np.ndarray:
        """True for the arms within some limits, [arms]."""
        return np.array([arm.within(limits) == arm for arm in self.arms])

    def place(self, arm: Arm) -> int:
        """The place of an arm."""
        return int(arm.ngram) * self.num_lengths + arm.speculation_length

    def around(self, factor: float) -> tuple[np.ndarray, np.ndarray]:
        """First range, and the one after the last, with batch sizes up to `factor` times smaller or larger, [ranges]."""
        first = np.searchsorted(self.high, np.ceil(self.sizes / factor))
        return first, np.maximum(np.searchsorted(self.low, self.sizes * factor, side="right"), first + 1)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Draft tokens of each length, [1, 1, lengths]."""
        return np.arange(self.num_lengths, dtype=float)[None, None]

    @cached_property
    def batch(self) -> np.ndarray:
        """Batch size of each range, [ranges, 1, 1]."""
        return self.sizes.astype(float)[:, None, None]


@dataclass(eq=False)
class Cells:
    """Cells with evidence. numbers: see `Grid`; features: of the first step in each, [cells, NUM_FEATURES]."""

    numbers: Array = field(default_factory=lambda: np.zeros(0, int))
    features: Array = field(default_factory=lambda: np.zeros((0, NUM_FEATURES)))

    def __post_init__(self) -> None:
        self._place = {number: at for at, number in enumerate(self.numbers.tolist())}

    def places(self, numbers: list[int], features: np.ndarray) -> list[int]:
        """Places of the steps' cells, which are added where they are new. features: of the steps."""
        known = self._place
        for at, number in enumerate(numbers):
            if number not in known:
                known[number] = len(known)
                self.numbers = np.append(self.numbers, number)
                self.features = np.vstack([self.features, features[at]])
        return [known[number] for number in numbers]

    def renumbered(self, old: Grid, new: Grid) -> Cells:
        """The same cells in a wider grid."""
        ranges, places = np.divmod(self.numbers, old.num_arms)
        return Cells(ranges * new.num_arms + moved(places, old, new), self.features)


def moved(places: np.ndarray, old: Grid, new: Grid) -> np.ndarray:
    """Places of arms in a wider grid."""
    kind, length = np.divmod(places, old.num_lengths)
    result: np.ndarray = kind * new.num_lengths + length
    return result


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
