"""What every plan would have done with an output: known from the output alone, token by token.

Outputs do not hang on what was proposed for them, so the steps that another plan would have taken through the same text
follow from what a copy would have proposed at each place, and from whether the draft model chooses the token that stands
there. Plain values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from speclen.worker.drafting.copying import CopyIndex

MOST_PROPOSED = 16  # tokens of a copy that are compared: no plan copies more
MOST_REVIEWED = 1024  # tokens of an output


class CopyReview(NamedTuple):
    """By token, as if it were the next: the match before it, tokens that a copy would propose, and how many are right."""

    matches: bytes
    proposed: bytes
    copied: bytes


class OutputReview(NamedTuple):
    """The tokens of an output that steps put out, all but the first, which comes with the prompt; or a part of them.

    request_class: of the request. copies: what rows would copy. drafted: by token, 1 where the draft model chooses the same
    one after all that stands before it, else 0; empty without a draft model. num_output_tokens: of all of them.
    """

    request_class: int
    copies: CopyReview
    drafted: bytes
    num_output_tokens: int


def review_copies(tokens: Sequence[int], first: int) -> CopyReview:
    """What would have been copied for the tokens from place `first` on, each with all those before it read."""
    index = CopyIndex()
    index.extend(tokens, first)
    matches, proposed, copied = (bytearray() for _ in CopyReview._fields)
    for place in range(first, len(tokens)):
        found = index.find(1, MOST_PROPOSED)
        ids = [] if found is None else found.ids
        matches.append(0 if found is None else found.match_length)
        proposed.append(len(ids))
        copied.append(_num_alike(ids, tokens[place : place + len(ids)]))
        index.extend(tokens, 1)
    return CopyReview(bytes(matches), bytes(proposed), bytes(copied))


def _num_alike(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((at for at, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other), len(others))
