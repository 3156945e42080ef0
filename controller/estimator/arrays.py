"""The name for arrays of 64-bit floats in signatures (docstrings give their shapes), and what numpy lacks."""

from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

Value = TypeVar("Value", bound=Hashable)


def distinct(values: Sequence[Value]) -> tuple[list[Value], np.ndarray]:
    """Distinct values in order of appearance, and for each value its position among them; cheaper than sorting."""
    places: dict[Value, int] = {}
    position = [places.setdefault(value, len(places)) for value in values]
    return list(places), np.array(position)
