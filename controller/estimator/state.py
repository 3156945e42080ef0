"""What was learned as plain values, and back: each class names the attributes that it goes on from in STATE."""

from __future__ import annotations

from typing import Any

import numpy as np


def exported(value: Any) -> Any:
    """JSON-able form of a number, text, array, list, dictionary or object with STATE."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: exported(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [exported(each) for each in value]
    if hasattr(value, "STATE"):
        return {name: exported(getattr(value, name)) for name in value.STATE}
    return value


def restored(here: Any, state: Any) -> Any:
    """The exported state as a value like `here`, which lends types and, for objects, is changed in place.

    KeyError, TypeError or ValueError where it is none, as with an array of another shape.
    """
    if isinstance(here, np.ndarray):
        values = np.array(state, dtype=here.dtype).reshape(here.shape if here.size == 0 else (-1, *here.shape[1:]))
        if values.shape != here.shape:
            raise ValueError(f"state has an array of {values.shape}, expected {here.shape}")
        return values
    if hasattr(here, "STATE"):
        for name in here.STATE:
            setattr(here, name, restored(getattr(here, name), state[name]))
        return here
    if isinstance(here, dict):
        return dict(state)
    if isinstance(here, list):
        return (
            [restored(*pair) for pair in zip(here, state, strict=True)]
            if here and hasattr(here[0], "STATE")
            else list(state)
        )
    return type(here)(state)
