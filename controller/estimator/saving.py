"""Saving and restoring the contexts of a pair."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from speclen.controller.estimator.state import UNUSABLE, Packed, finite, pack
from speclen.controller.estimator.tokens import TokenPrior

if TYPE_CHECKING:
    from speclen.controller.estimator.context import Context


def save_pair(contexts: Sequence[Context], prior: TokenPrior) -> bytes:
    """Everything that was learned of a pair."""
    header = {"contexts": [context.header() for context in contexts]}
    parts: dict[str, Any] = {"prior": prior}
    for at, context in enumerate(contexts):
        parts |= {f"{at}/{name}": part for name, part in context.parts()}
    return pack(header, parts)


def restore_pair(contexts: Sequence[Context], prior: TokenPrior, content: bytes) -> None:
    """Go on from what was saved. ValueError for what is no state of these contexts."""
    packed = Packed(content)
    try:
        headers = packed.header["contexts"]
        by_key = {json.dumps(list(context.key)): context for context in contexts}
        packed.restore("prior", prior)
        for at, header in enumerate(headers):
            context = by_key[json.dumps(header["key"])]
            context.restore_header(header)
            for name, part in context.parts():
                packed.restore(f"{at}/{name}", part)
            context.check_restored()
            if not finite(_arrays(context)):
                raise ValueError(f"a number of context {context.key.device} is not finite")
    except UNUSABLE as error:
        raise ValueError(f"the state does not fit its contexts: {error}") from error


def _arrays(context: Context) -> Iterator[np.ndarray]:
    for _, part in context.parts():
        for name in part.STATE:
            yield np.asarray(getattr(part, name), dtype=float)
