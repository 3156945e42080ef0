"""Tokens copied from a row's own text, or from what others were given: what followed when it last read as it does now. Knows
plain numbers only.

The index is a suffix automaton (Blumer et al. 1985), which grows by at most two states a token in constant time on
average. The longest end of the text that stood in it before is the state that its last state links to, so nothing is
searched. Chains of n-grams, as in compressors, are built in a third of the time but searched in several times of it;
docs/engine.md has the figures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from speclen.worker.drafting.plan import MAX_MATCH

MAX_INDEXED = 16_384  # tokens of a row, some 500 bytes each; beyond, the older half is forgotten
LEAST_FREQUENCY = 0.1  # a copy ends where less of what was read alike went on like it
MOST_COMPARED = 64  # continuations among which the most frequent is looked for when a token is judged: for bounded time
END = -1  # of an output, where outputs follow each other
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

    def add(self, counts: Iterable[tuple[int, int, int]]) -> None:
        """Count what another one has read, too."""
        for match, tokens, right in counts:
            self.tokens[match] += tokens
            self.right[match] += right

    @property
    def counts(self) -> tuple[tuple[int, int, int], ...]:
        """(match, tokens, right ones), of the matches that there were."""
        both = zip(self.tokens, self.right, strict=True)
        return tuple((match, tokens, right) for match, (tokens, right) in enumerate(both) if tokens)


class SuffixAutomaton:
    """All strings of a text that grows, and how often each was read.

    States are numbers; of each: transitions by token, the state of its longest suffix that occurs elsewhere, the length of
    its longest string, how often that was read.
    """

    __slots__ = ("_counts", "_last", "_lengths", "_links", "_next")

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._links, self._lengths, self._counts = [-1], [0], [0]
        self._last = 0

    @property
    def num_tokens(self) -> int:
        """Of the text."""
        return self._lengths[self._last]

    def add(self, token: int) -> None:
        """Read another token of the text."""
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

    def state_of(self, state: int, length: int) -> int:
        """Where a string of this length is now: short ones may have got a state of their own since."""
        while state > 0 and self._lengths[self._links[state]] >= length:
            state = self._links[state]
        return state

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Where a string leads by a token more. state, length: of its longest end that stands in the text; so returned."""
        following, links, lengths = self._next, self._links, self._lengths
        state = self.state_of(state, length)
        while state > 0 and token not in following[state]:
            state = links[state]
            length = lengths[state]
        reached = following[state].get(token)
        return (0, 0) if reached is None else (reached, length + 1)

    def judge(self, state: int, length: int, token: int) -> tuple[int, bool]:
        """The match behind which the token stands, and whether a copy would have been right about it.

        state, length: as in `advance`. Where no copy would have been proposed, it stands behind a match of none.
        """
        if state <= 0 or not (children := self._next[self.state_of(state, length)]):
            return 0, False
        match = min(length, MAX_MATCH)
        if len(children) == 1:
            return (0, False) if END in children else (match, token in children)
        if len(children) > MOST_COMPARED:
            return match, False
        total, (likely, reached) = self._most_frequent(children)
        rare = likely == END or self._counts[reached] < LEAST_FREQUENCY * total
        return (0, False) if rare else (match, token == likely)

    def continuation(self, state: int, most: int, begins_anew: bool = False) -> list[int]:
        """Up to `most` tokens that followed what leads to a state: the most frequent ones, cut where that is too rare.

        begins_anew: at the end of the text it goes on as it did from `state`, as in a loop; else that is the end.
        """
        ids: list[int] = []
        begin, frequency = state, 1.0
        while len(ids) < most:
            children = self._next[state] or (self._next[begin] if begins_anew else {})
            if len(children) == 1:
                ((token, state),) = children.items()
            elif not children:
                break
            else:
                total, (token, state) = self._most_frequent(children)
                frequency *= self._counts[state] / total
                if frequency < LEAST_FREQUENCY:
                    break
            if token == END:
                break
            ids.append(token)
        return ids

    def _most_frequent(self, children: dict[int, int]) -> tuple[int, tuple[int, int]]:
        """How often any of the children was read, at least 1, and the one that was most often, the newest of such."""
        counts, total, most, found = self._counts, 0, -1, (0, 0)
        for child in children.items():
            count = counts[child[1]]
            total += count
            if count >= most:
                most, found = count, child
        return max(total, 1), found


class CopyIndex(SuffixAutomaton):
    """Of one row's prompt and output, as far as `extend` has come. num_indexed: tokens, those forgotten included."""

    __slots__ = ("num_indexed",)

    def __init__(self) -> None:
        self.num_indexed = 0
        super().__init__()

    def extend(
        self,
        tokens: Sequence[int],
        most: int,
        reading: Reading | None = None,
        judged_from: int = 0,
        past: PastReader | None = None,
    ) -> int:
        """Read up to `most` more of the tokens; returns how many there were. tokens: the row's, from the first on.

        reading: where to count those from `judged_from` on. past: what may be copied from, too; it reads along.
        """
        if self.num_tokens >= MAX_INDEXED:
            self.num_indexed -= MAX_INDEXED // 2
            self._clear()
        begin = self.num_indexed
        end = min(len(tokens), begin + most)
        if past is not None:
            past.begin(tokens[max(0, begin - MAX_MATCH) : begin])
        for place, token in enumerate(tokens[begin:end], begin):
            if reading is not None and place >= judged_from:
                state = self._links[self._last]
                match, right = self.judge(state, self._lengths[state], token)
                if past is not None:
                    match, right = max((match, right), past.judge(token), key=_match)
                reading.tokens[match] += 1
                reading.right[match] += right
            self.add(token)
            if past is not None:
                past.advance(token)
        self.num_indexed = end
        return end - begin

    def find(self, min_match: int, most: int) -> Copied | None:
        """Up to `most` tokens that may follow what was read; None where less than min_match tokens were read before.

        Of the longest match the most frequent continuation, cut where the product of its frequencies is too small.
        """
        begin = self._links[self._last]
        if begin <= 0 or self._lengths[begin] < min_match:
            return None
        ids = self.continuation(begin, most, begins_anew=True)
        return Copied(ids, min(self._lengths[begin], MAX_MATCH)) if ids else None


class PastOutputs:
    """What requests that have ended were given, for others to copy from: the newest tokens, at most num_tokens.

    Two automata, the one that grows and the one before it, which is forgotten as a whole: nothing is read twice.
    """

    def __init__(self, num_tokens: int) -> None:
        self._most_each = max(1, num_tokens // 2)
        self._waiting: deque[int] = deque(maxlen=self._most_each)
        self.automata = (SuffixAutomaton(), SuffixAutomaton())  # the one that grows first
        self.num_forgotten = 0  # automata

    def add(self, output: Sequence[int]) -> None:
        """Have an output read in the steps that follow."""
        self._waiting.extend(output)
        self._waiting.append(END)

    def read(self, most: int) -> None:
        """Read up to `most` tokens of those that wait."""
        growing, before = self.automata
        for _ in range(min(most, len(self._waiting))):
            if growing.num_tokens >= self._most_each:
                growing, before = SuffixAutomaton(), growing
                self.automata, self.num_forgotten = (growing, before), self.num_forgotten + 1
            growing.add(self._waiting.popleft())


class PastReader:
    """Where the last tokens of one row stand in past outputs."""

    __slots__ = ("_forgotten", "_past", "_places")

    def __init__(self, past: PastOutputs) -> None:
        self._past, self._forgotten = past, -1
        self._places: list[tuple[SuffixAutomaton, int, int]] = []

    def begin(self, recent: Sequence[int]) -> None:
        """Begin anew behind these tokens where one of the automata is another one than before."""
        if self._forgotten != self._past.num_forgotten:
            self._forgotten = self._past.num_forgotten
            self._places = [(automaton, 0, 0) for automaton in self._past.automata]
            for token in recent:
                self.advance(token)

    def advance(self, token: int) -> None:
        """Read the row's next token."""
        self._places = [(each, *each.advance(state, length, token)) for each, state, length in self._places]

    def judge(self, token: int) -> tuple[int, bool]:
        """As `SuffixAutomaton.judge`, of the longer match of both."""
        return max((each.judge(state, length, token) for each, state, length in self._places), key=_match)

    def find(self, min_match: int, most: int) -> Copied | None:
        """As `CopyIndex.find`, likewise; nothing beyond the end of an output."""
        automaton, state, length = max(self._places, key=_length)
        if length < min_match or not (ids := automaton.continuation(automaton.state_of(state, length), most)):
            return None
        return Copied(ids, min(length, MAX_MATCH))


def _match(judged: tuple[int, bool]) -> int:
    return judged[0]


def _length(place: tuple[SuffixAutomaton, int, int]) -> int:
    return place[2]
