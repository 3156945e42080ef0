"""The law: what is proposed followed the longest end of the text that was read before, most often; whatever the text.

The index is compared with a search through the whole text, on texts of few tokens, where everything occurs.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections import Counter

import pytest

from speclen.worker.drafting import copying
from speclen.worker.drafting.copying import CopyIndex

EVERYTHING = 10**9


def indexed(tokens: list[int]) -> CopyIndex:
    index = CopyIndex()
    index.extend(tokens, EVERYTHING)
    return index


def longest_match(tokens: list[int]) -> tuple[int, list[int]]:
    """Length of the longest end of the text that stands earlier in it, and the places after those; by trying all."""
    for length in range(len(tokens) - 1, 0, -1):
        tail = tokens[-length:]
        places = [at + length for at in range(len(tokens) - length) if tokens[at : at + length] == tail]
        if places:
            return length, places
    return 0, []


@pytest.mark.parametrize("num_kinds", [1, 2, 3, 10])
def test_the_longest_match_is_found_and_followed(num_kinds: int) -> None:
    generator = random.Random(num_kinds)
    for _ in range(300):
        tokens = [generator.randrange(num_kinds) for _ in range(generator.randint(1, 40))]
        length, places = longest_match(tokens)
        found = indexed(tokens).find(1, 8)
        if not length:
            assert found is None
            continue
        assert found is not None
        assert found.match_length == min(length, copying.MAX_MATCH)
        assert found.ids[0] in {tokens[place] for place in places}
        assert 1 <= len(found.ids) <= 8
        # Whatever is proposed after the match was read after it, as far as the text goes.
        string = tokens[-length:] + found.ids
        within = string[: length + 1]
        assert any(tokens[at : at + len(within)] == within for at in range(len(tokens)))


@pytest.mark.parametrize("num_kinds", [1, 2, 5, 200])
def test_what_is_read_is_judged_as_a_copy_would_have_been(num_kinds: int) -> None:
    """Of every token the match that it stood behind, and whether the copy proposed there begins with it."""
    generator, judged_from = random.Random(num_kinds), 30
    tokens = [generator.randrange(num_kinds) for _ in range(400)]
    tokens += tokens[100:200]
    expected: Counter[tuple[int, bool]] = Counter()
    for place in range(judged_from, len(tokens)):
        found = indexed(tokens[:place]).find(1, 1)
        match = 0 if found is None else found.match_length
        expected[match, found is not None and found.ids[0] == tokens[place]] += 1
    index, reading = CopyIndex(), copying.Reading()
    while index.num_indexed < len(tokens):
        index.extend(tokens, 7, reading, judged_from)
    assert sum(count for _, count, _ in reading.counts) == len(tokens) - judged_from
    for match, count, right in reading.counts:
        assert (count, right) == (expected[match, False] + expected[match, True], expected[match, True])


def test_few_of_many_continuations_are_looked_at() -> None:
    """So that judging a token takes bounded time; the copy that is not looked for counts as wrong."""
    index, reading = CopyIndex(), copying.Reading()
    text = [token for kind in range(copying.MOST_COMPARED + 1) for token in (0, 1 + kind)] + [0]
    index.extend(text, EVERYTHING)
    index.extend([*text, 1], EVERYTHING, reading)
    assert reading.counts == ((1, 1, 0),)


def test_an_index_that_grew_token_by_token_is_the_same() -> None:
    generator = random.Random(5)
    tokens = [generator.randrange(4) for _ in range(200)]
    grown = CopyIndex()
    for end in range(len(tokens) + 1):
        grown.extend(tokens[:end], EVERYTHING)
        assert grown.num_indexed == end
        assert grown.find(1, 6) == indexed(tokens[:end]).find(1, 6)


def test_a_match_shorter_than_asked_for_is_none() -> None:
    index = indexed([1, 2, 3, 4, 9, 2, 3])
    assert index.find(2, 4) == copying.Copied([4, 9, 2, 3], 2)
    assert index.find(3, 4) is None
    assert index.find(2, 2) == copying.Copied([4, 9], 2)
    assert index.find(2, 0) is None


def test_the_most_frequent_continuation_is_followed_and_cut_where_it_is_rare() -> None:
    often = [7, 1, 7, 1, 7, 2]
    assert indexed([5, *often, 6, 7]).find(1, 1) == copying.Copied([1], 1)
    different = [token for follower in range(20) for token in (7, 100 + follower)]
    assert indexed([*different, 7]).find(1, 4) is None  # 20 continuations, each once: none is worth a token


@pytest.mark.parametrize("period", [1, 2, 5])
def test_a_loop_goes_on_as_it_began(period: int) -> None:
    tokens = list(range(period)) * 12
    found = indexed(tokens).find(2, 9)
    assert found is not None
    assert found.ids == [at % period for at in range(9)]


def test_an_empty_text_and_a_single_token_propose_nothing() -> None:
    assert CopyIndex().find(1, 8) is None
    assert indexed([3]).find(1, 8) is None
    assert indexed([3, 4]).find(1, 8) is None


def test_reading_is_bounded_and_goes_on_where_it_stopped() -> None:
    tokens = [1, 2, 3] * 50
    index = CopyIndex()
    assert index.extend(tokens, 100) == 100
    assert index.extend(tokens, 100) == 50
    assert index.extend(tokens, 100) == 0
    assert index.find(2, 3) == indexed(tokens).find(2, 3)


def test_memory_is_bounded_and_the_older_half_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "MAX_INDEXED", 100)
    generator, index, tokens = random.Random(0), CopyIndex(), []
    for _ in range(500):
        tokens.append(generator.randrange(3))
        while index.num_indexed < len(tokens):
            index.extend(tokens, EVERYTHING)
        assert len(index._next) <= 2 * 151
    recent = index.find(1, 4)
    assert recent is not None
    assert recent.match_length <= 100


@pytest.mark.parametrize("kind", ["one token", "random", "period"])
def test_reading_takes_the_same_time_and_memory_for_any_text(kind: str) -> None:
    """Twice the text takes about twice as long; far from the square, which a loop over occurrences would take."""
    generator = random.Random(0)
    tokens = {
        "one token": [7] * 8000,
        "random": [generator.randrange(2000) for _ in range(8000)],
        "period": [at % 50 for at in range(8000)],
    }[kind]

    def seconds(num_tokens: int) -> float:
        started = time.process_time()
        for _ in range(3):
            indexed(tokens[:num_tokens]).find(1, 16)
        return time.process_time() - started

    assert min(seconds(8000) for _ in range(3)) < 16 * min(seconds(1000) for _ in range(3)) + 0.05
    tracemalloc.start()
    index = indexed(tokens)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert index.num_indexed == 8000
    assert used < 8000 * 700
