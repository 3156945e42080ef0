"""Saving what was learned as bytes, and restoring it: dataclasses as JSON, arrays in it as their bytes."""

from __future__ import annotations

import base64
from typing import Annotated, Any

import numpy as np
from pydantic import PlainSerializer, PlainValidator


def _pack(array: np.ndarray) -> tuple[str, tuple[int, ...], str]:
    return array.dtype.str, array.shape, base64.b64encode(array.tobytes()).decode()


def _unpack(value: Any) -> np.ndarray:
    """Raises ValueError for what is no array of finite numbers."""
    try:
        dtype, shape, content = value
        array = np.frombuffer(base64.b64decode(content), {"<f8": float, "<i8": int, "|b1": bool}[dtype]).reshape(shape)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError("this is no array") from error
    if not np.isfinite(array).all():
        raise ValueError("a number is not finite")
    return array.copy()


# Array of numbers that belongs to what is saved.
Array = Annotated[np.ndarray, PlainValidator(_unpack), PlainSerializer(_pack)]
