"""Tokens copied from a row's own text: what followed when it last read as it does now. Knows plain numbers only.

The index is a suffix automaton (Blumer et al. 1985), which grows by at most two states a token in constant time on
average. The longest end of the text that stood in it before is the state that its last state links to, so nothing is
searched. Chains of n-grams, as in compressors, are built in a third of the time but searched in several times of it;
docs/engine.md has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speclen.worker.drafting.plan import MAX_MATCH

MAX_INDEXED = 16_384  # tokens of a row, some 500 bytes each; beyond, the older half is forgotten
LEAST_FREQUENCY = 0.1  # a copy ends where less of what was read alike went on like it
MOST_COMPARED = 64  # continuations among which the most frequent is looked for when a token is judged: for bounded time
COUNTED = 8  # suffixes of each place whose occurrences are counted, the longest first: for constant time


@dataclass(frozen=True, slots=True)
class Copied:
    """ids: proposed, at least one. match_length: tokens before them that were read before, at most MAX_MATCH."""

    ids: list[int]
    match_length: int


class Reading:
    """What indexes have read of outputs: tokens that stood behind a match of each length, and those a copy said right."""

    __slots__ = ("right", "tokens")

    def __init__(self) -> None:
        self.tokens, self.right = [0] * (MAX_MATCH + 1), [0] * (MAX_MATCH + 1)

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens)

    @property
    def counts(self) -> tuple[tuple[int, int, int], ...]:
        """(match, tokens, right ones), of the matches that there were."""
        both = zip(self.tokens, self.right, strict=True)
        return tuple((match, tokens, right) for match, (tokens, right) in enumerate(both) if tokens)


class CopyIndex:
    """Of one row's prompt and output, as far as `extend` has come.

    num_indexed: tokens of the row, those forgotten included. States are numbers; of each: transitions by token, the
    state of its longest suffix that occurs elsewhere, the length of its longest string, how often that was read.
    """

    __slots__ = ("_counts", "_last", "_lengths", "_links", "_next", "num_indexed")

    def __init__(self) -> None:
        self.num_indexed = 0
        self._clear()

    def _clear(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._links, self._lengths, self._counts = [-1], [0], [0]
        self._last = 0

    def extend(self, tokens: Sequence[int], most: int, reading: Reading | None = None, judged_from: int = 0) -> int:
        """Read up to `most` more of the tokens; returns how many there were. tokens: the row's, from the first on.

        reading: where to count those from `judged_from` on.
        """
        if self._lengths[self._last] >= MAX_INDEXED:
            self.num_indexed -= MAX_INDEXED // 2
            self._clear()
        begin = self.num_indexed
        end = min(len(tokens), begin + most)
        for place, token in enumerate(tokens[begin:end], begin):
            if reading is not None and place >= judged_from:
                self._judge(token, reading)
            self._add(token)
        self.num_indexed = end
        return end - begin

    def _judge(self, token: int, reading: Reading) -> None:
        """Count the next token: behind which match it stands, and whether a copy would have been right about it.

        Where no copy would have been proposed, it stands behind none.
        """
        begin = self._links[self._last]
        if begin <= 0:
            reading.tokens[0] += 1
            return
        match, children = min(self._lengths[begin], MAX_MATCH), self._next[begin]
        if len(children) == 1:
            reading.tokens[match] += 1
            reading.right[match] += token in children
        elif len(children) > MOST_COMPARED:
            reading.tokens[match] += 1
        else:
            total, (likely, state) = self._most_frequent(children)
            if self._counts[state] < LEAST_FREQUENCY * total:
                match = 0
            reading.tokens[match] += 1
            reading.right[match] += match > 0 and token == likely

    def _add(self, token: int) -> None:
        following, links, lengths, counts = self._next, self._links, self._lengths, self._counts
        state, new = self._last, len(following)
        following.append({})
        links.append(0)
        lengths.append(lengths[state] + 1)
        counts.append(0)
        while state != -1 and token not in following[state]:
            following[state][token] = new
            state = links[state]
        if state != -1:
            links[new] = self._suffix(state, token)
        self._last = state = new
        for _ in range(COUNTED):
            if state <= 0:
                break
            counts[state] += 1
            state = links[state]

    def _suffix(self, state: int, token: int) -> int:
        """The state of exactly the longest string of `state` and the token: a part of the one it leads to, if need be."""
        following, links, lengths = self._next, self._links, self._lengths
        reached = following[state][token]
        if lengths[state] + 1 == lengths[reached]:
            return reached
        part = len(following)
        following.append(following[reached].copy())
        links.append(links[reached])
        lengths.append(lengths[state] + 1)
        self._counts.append(self._counts[reached])
        while state != -1 and following[state].get(token) == reached:
            following[state][token] = part
            state = links[state]
        links[reached] = part
        return part

    def find(self, min_match: int, most: int) -> Copied | None:
        """Up to `most` tokens that may follow what was read; None where less than min_match tokens were read before.

        Of the longest match the most frequent continuation, cut where the product of its frequencies is too small.
        """
        begin = self._links[self._last]
        if begin <= 0 or self._lengths[begin] < min_match:
            return None
        ids: list[int] = []
        state, frequency = begin, 1.0
        while len(ids) < most:
            children = self._next[state] or self._next[begin]  # at the end of the text: a loop goes on as it began
            if len(children) == 1:
                ((token, state),) = children.items()
            else:
                total, (token, state) = self._most_frequent(children)
                frequency *= self._counts[state] / total
                if frequency < LEAST_FREQUENCY:
                    break
            ids.append(token)
        return Copied(ids, min(self._lengths[begin], MAX_MATCH)) if ids else None

    def _most_frequent(self, children: dict[int, int]) -> tuple[int, tuple[int, int]]:
        """How often any of the children was read, at least 1, and the one that was most often, the newest of such."""
        counts, total, most, found = self._counts, 0, -1, (0, 0)
        for child in children.items():
            count = counts[child[1]]
            total += count
            if count >= most:
                most, found = count, child
        return max(total, 1), found
