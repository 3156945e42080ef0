"""A proposal follows the longest suffix of the text that occurred before, and most often; for any text.

The index is compared with a search through the whole text, on texts of few tokens, where everything occurs.
"""

import random

import pytest

from speclen.worker.requests import ngrams
from speclen.worker.requests.ngrams import NgramIndex

EVERYTHING = 10**9


def indexed(tokens: list[int]) -> NgramIndex:
    index = NgramIndex()
    index.extend(tokens, EVERYTHING)
    return index


def longest_match(tokens: list[int]) -> tuple[int, list[int]]:
    """Length of the longest suffix that occurs earlier in the text, and the places after its occurrences, by brute force."""
    for length in range(len(tokens) - 1, 0, -1):
        tail = tokens[-length:]
        places = [at + length for at in range(len(tokens) - length) if tokens[at : at + length] == tail]
        if places:
            return length, places
    return 0, []


@pytest.mark.parametrize("num_kinds", [1, 2, 3, 10])
def test_the_longest_match_is_found_and_followed(num_kinds):
    generator = random.Random(num_kinds)
    for _ in range(300):
        tokens = [generator.randrange(num_kinds) for _ in range(generator.randint(1, 40))]
        length, places = longest_match(tokens)
        found = indexed(tokens).propose(8)
        assert bool(found) == (length > 0)
        if found:
            assert found[0] in {tokens[place] for place in places}
            assert len(found) <= min(8, length)
            within = tokens[-length:] + found[:1]
            assert any(tokens[at : at + len(within)] == within for at in range(len(tokens)))


def test_an_index_grown_token_by_token_equals_one_built_at_once():
    generator = random.Random(5)
    tokens = [generator.randrange(4) for _ in range(200)]
    grown = NgramIndex()
    for end in range(len(tokens) + 1):
        grown.extend(tokens[:end], EVERYTHING)
        assert grown.num_indexed == end
        assert grown.propose(6) == indexed(tokens[:end]).propose(6)


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ([1, 2, 3, 4, 9, 2, 3], 4, [4, 9]),  # as many as the match is long
        ([1, 2, 3, 4, 9, 2, 3], 1, [4]),
        ([1, 2, 3, 4, 9, 2, 3], 0, []),
        ([1, 2, 1, 2, 1, 2], 8, [1, 2, 1, 2]),  # at the end of the text it starts again
        ([], 8, []),
        ([3], 8, []),
        ([3, 4], 8, []),
        ([5, 7, 1, 7, 1, 7, 2, 6, 7], 8, [1]),  # the most frequent continuation
        ([7, 1, 7, 2, 7], 8, [2]),  # the newest of equals
    ],
)
def test_a_proposal_continues_the_longest_most_frequent_match(tokens, most, expected):
    assert indexed(tokens).propose(most) == expected


def test_memory_is_bounded_and_the_older_half_is_forgotten(monkeypatch):
    monkeypatch.setattr(ngrams, "MAX_INDEXED", 100)
    index, tokens = NgramIndex(), [7, 8, 9, 1] + [at % 5 + 10 for at in range(500)]
    while index.num_indexed < len(tokens):
        index.extend(tokens, 40)
    assert index.propose(2) == [tokens[-5], tokens[-4]]
    index.extend([*tokens, 7, 8, 9], EVERYTHING)
    assert index.propose() == [], "what stood before them is forgotten"
