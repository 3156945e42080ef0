"""N-gram (prompt-lookup) drafting: propose the tokens that followed an earlier occurrence of the last tokens.

The index is a suffix automaton (Blumer et al. 1985). A token adds at most two states, in constant time on average. The last
state links to that of the longest suffix which occurred before, so there is no search. Hash chains of n-grams, as in
compressors, are built in a third of the time but take several times as long to search.
"""

from __future__ import annotations

from collections.abc import Sequence

from speclen.records import NGRAM_MAX_TOKENS

MAX_INDEXED = 16_384  # tokens of a sequence, some 500 bytes each; then the older half is forgotten
LEAST_BESIDE_DRAFT = (
    2  # shortest match that replaces draft tokens: the draft model does better than a match of one token
)
COUNTED_SUFFIXES = (
    8  # suffixes whose occurrences are counted at each token, the longest first: a bound for constant time
)


class NgramIndex:
    """Index of all substrings of a sequence's tokens. num_indexed: number of tokens indexed, including forgotten ones.

    States are numbers. Each has its transitions by token, a link to the state of its longest suffix that occurs elsewhere,
    the length of its longest string, and a number of occurrences.
    """

    __slots__ = ("_counts", "_last", "_lengths", "_links", "_next", "num_indexed")

    def __init__(self) -> None:
        self.num_indexed = 0
        self._clear()

    def _clear(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._links, self._lengths, self._counts = [-1], [0], [0]
        self._last = 0

    def extend(self, tokens: Sequence[int], most: int) -> int:
        """Index up to `most` more tokens, and return how many. tokens: all tokens of the sequence."""
        if self._lengths[self._last] >= MAX_INDEXED:
            self.num_indexed -= MAX_INDEXED // 2
            self._clear()
        begin = self.num_indexed
        end = min(len(tokens), begin + most)
        for token in tokens[begin:end]:
            self._add(token)
        self.num_indexed = end
        return end - begin

    def propose(self, most: int = NGRAM_MAX_TOKENS) -> list[int]:
        """Propose up to `most` tokens, and no more than the match has: the longest suffix that occurred before.

        They are the most frequent continuation of the match. At the end of the text, the
        proposal continues from the match again.
        """
        begin = self._links[self._last]
        if begin <= 0:
            return []
        most = min(most, self._lengths[begin])
        ids: list[int] = []
        state = begin
        while len(ids) < most:
            token, state = self._most_frequent(self._next[state] or self._next[begin])
            ids.append(token)
        return ids

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
        for _ in range(COUNTED_SUFFIXES):
            if state <= 0:
                break
            counts[state] += 1
            state = links[state]

    def _suffix(self, state: int, token: int) -> int:
        """The state whose longest string is that of `state` plus the token; it is split off if necessary."""
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

    def _most_frequent(self, children: dict[int, int]) -> tuple[int, int]:
        """Token and state of the most frequent child; of equally frequent ones the newest."""
        counts, most, found = self._counts, -1, (0, 0)
        for child in children.items():
            if counts[child[1]] >= most:
                most, found = counts[child[1]], child
        return found
