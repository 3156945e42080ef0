"""What was learned as plain values, and back: each class names the attributes that it goes on from in STATE."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

# Arrays of more numbers are written as the bytes they are, in base64: a context has 50,000 numbers in a large fleet, which
# would take 40 ms as text, every second.
SHORT = 32


def _packed(values: np.ndarray) -> dict[str, Any]:
    raw = base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")
    return {"dtype": values.dtype.str, "shape": list(values.shape), "base64": raw}


def _array(state: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """The array that was exported. ValueError, TypeError or KeyError where it is none."""
    if not isinstance(state, dict):
        return np.array(state, dtype=dtype)
    if state["dtype"] != dtype.str:
        raise ValueError(f"state has an array of {state['dtype']}, expected {dtype.str}")
    raw = base64.b64decode(state["base64"], validate=True)
    return np.frombuffer(raw, dtype=dtype).reshape(state["shape"]).copy()


def exported(value: Any) -> Any:
    """JSON-able form of a number, text, array, list, dictionary or object with STATE."""
    if isinstance(value, np.ndarray):
        return value.tolist() if value.size <= SHORT else _packed(value)
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
        values = _array(state, here.dtype).reshape(here.shape if here.size == 0 else (-1, *here.shape[1:]))
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


def forget(here: Any, new: Any) -> None:
    """Let an object be what a new one is, in place, for all who hold it."""
    for name in here.STATE:
        setattr(here, name, getattr(new, name))
    if hasattr(here, "renew"):
        here.renew()
