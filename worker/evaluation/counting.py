"""Steps that each arm would have taken through one finished output. Plain lists: some 0.1 ms per 64 tokens and 18 arms.

The output does not depend on what was drafted. So the steps of any arm follow from the n-gram proposals at each token, and
from the tokens on which the draft model agrees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from speclen.records import Limits
from speclen.worker.drafting.ngrams import LEAST_BESIDE_DRAFT, NgramIndex


class EvaluatedTokens(NamedTuple):
    """By evaluated token, as if it were the next one to generate.

    proposed: length of the n-gram proposal; right: length of its accepted prefix. drafted: consecutive tokens from this one
    on that the draft model would have proposed.
    """

    proposed: list[int]
    right: list[int]
    drafted: list[int]


def count_steps(tokens: EvaluatedTokens, limits: Limits) -> Iterator[tuple[int, ...]]:
    """Steps, steps that draft, and verified tokens, of each arm in the order of `Limits.arms`.

    Step through the tokens under every arm; each step advances by its accepted run and one token more.
    """
    lengths = range(limits.max_speculation_length + 1)
    counts = [_without_ngrams(tokens.drafted, length) for length in lengths]
    if limits.ngram:
        counts += [_with_ngrams(tokens, length) for length in lengths]
    return zip(*counts, strict=True)


def _without_ngrams(drafted: list[int], length: int) -> tuple[int, int, int]:
    """Steps, steps that draft, and verified tokens."""
    end = len(drafted)
    if not length:
        return end, 0, end
    at = steps = 0
    while at < end:
        run = drafted[at]
        at += (run if run < length else length) + 1
        steps += 1
    return steps, steps, steps * (length + 1)


def _with_ngrams(tokens: EvaluatedTokens, length: int) -> tuple[int, int, int]:
    proposed, right, drafted = tokens
    end, least = len(proposed), LEAST_BESIDE_DRAFT if length else 1
    at = others = matches = verified = 0
    while at < end:
        number = proposed[at]
        if number >= least:
            matches += 1
            verified += number
            at += right[at] + 1
        else:
            others += 1
            run = drafted[at]
            at += (run if run < length else length) + 1
    return matches + others, others if length else 0, verified + matches + others * (length + 1)


def evaluate_ngrams(tokens: Sequence[int], first: int) -> tuple[list[int], list[int]]:
    """`proposed` and `right` for the tokens from place `first` on, each with all those before it indexed."""
    index, proposed, right = NgramIndex(), [], []
    index.extend(tokens, first)
    for place in range(first, len(tokens)):
        ids = index.propose()
        proposed.append(len(ids))
        right.append(_num_alike(ids, tokens, place))
        index.extend(tokens, 1)
    return proposed, right


def _num_alike(ids: list[int], tokens: Sequence[int], place: int) -> int:
    """Length of the prefix of ids with which the tokens continue from a place on."""
    number, end = 0, len(tokens)
    for token in ids:
        if place >= end or tokens[place] != token:
            break
        number += 1
        place += 1
    return number


def runs_of(chosen: Sequence[bool]) -> list[int]:
    """Length of the run of true values that begins at each place."""
    runs, run = [0] * len(chosen), 0
    for at in range(len(chosen) - 1, -1, -1):
        run = run + 1 if chosen[at] else 0
        runs[at] = run
    return runs
