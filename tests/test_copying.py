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
from speclen.worker.drafting.copying import END, CopyIndex, PastOutputs, PastReader

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


def reader_of(outputs: list[list[int]], tokens: list[int], num_tokens: int = 10_000) -> tuple[PastOutputs, PastReader]:
    past = PastOutputs(num_tokens)
    for output in outputs:
        past.add(output)
        past.read(EVERYTHING)
    reader = PastReader(past)
    CopyIndex().extend(tokens, EVERYTHING, past=reader)
    return past, reader


def longest_in(outputs: list[list[int]], tokens: list[int]) -> tuple[int, set[int]]:
    """Length of the longest end of the tokens that stands in an output, and what follows there; by trying all."""
    for length in range(len(tokens), 0, -1):
        tail = tokens[-length:]
        places = [(each, at + length) for each in outputs for at in range(len(each)) if each[at : at + length] == tail]
        if places:
            return length, {each[end] for each, end in places if end < len(each)}
    return 0, set()


@pytest.mark.parametrize("num_kinds", [2, 3, 10])
def test_past_outputs_are_followed_where_they_read_alike(num_kinds: int) -> None:
    generator = random.Random(num_kinds)
    for _ in range(200):
        outputs = [[generator.randrange(num_kinds) for _ in range(generator.randint(1, 20))] for _ in range(4)]
        tokens = [generator.randrange(num_kinds) for _ in range(generator.randint(1, 20))]
        length, following = longest_in(outputs, tokens)
        _, reader = reader_of(outputs, tokens)
        found = reader.find(1, 6)
        if found is None:
            continue  # an output ends there most often
        assert found.match_length == min(length, copying.MAX_MATCH)
        assert found.ids[0] in following
        assert END not in found.ids
        within = tokens[-length:] + found.ids[:1]
        assert any(each[at : at + len(within)] == within for each in outputs for at in range(len(each)))
        assert reader.find(length + 1, 6) is None


def test_an_output_is_copied_to_its_end_and_no_further() -> None:
    _, reader = reader_of([[1, 2, 3, 4, 5], [9, 8, 7]], [6, 2, 3])
    assert reader.find(1, 16) == copying.Copied([4, 5], 2)
    _, reader = reader_of([[1, 2, 3]], [2, 3])
    assert reader.find(1, 16) is None


def test_what_is_read_is_judged_by_the_longer_match_of_both() -> None:
    """The row's own text says 7 after one token, the past output 5 after three."""
    past, reader = reader_of([[1, 2, 3, 5]], [])
    index, reading, tokens = CopyIndex(), copying.Reading(), [3, 7, 1, 2, 3, 5]
    index.extend(tokens, 5, past=reader)
    index.extend(tokens, EVERYTHING, reading, 5, reader)
    assert reading.counts == ((3, 1, 1),)
    alone = copying.Reading()
    index = CopyIndex()
    index.extend(tokens, 5)
    index.extend(tokens, EVERYTHING, alone, 5)
    assert alone.counts == ((1, 1, 0),)
    assert past.num_forgotten == 0


def test_past_outputs_read_later_are_found_by_rows_that_began_before() -> None:
    """Also where what a row stood in has been split since."""
    generator = random.Random(3)
    for _ in range(100):
        outputs = [[generator.randrange(3) for _ in range(12)] for _ in range(5)]
        tokens = [generator.randrange(3) for _ in range(30)]
        past = PastOutputs(10_000)
        reader, index = PastReader(past), CopyIndex()
        for end, output in zip(range(6, 31, 6), outputs, strict=True):
            index.extend(tokens[:end], EVERYTHING, past=reader)
            past.add(output)
            past.read(EVERYTHING)
        found = reader.find(1, 1)
        if found is not None:  # It may be of a shorter match than there is by now, but not of one that there is not.
            assert found.match_length <= longest_in(outputs, tokens)[0]
            tail = tokens[-found.match_length :] + found.ids
            assert any(each[at : at + len(tail)] == tail for each in outputs for at in range(len(each)))


def test_past_outputs_are_bounded_and_the_oldest_are_forgotten() -> None:
    generator, past = random.Random(0), PastOutputs(200)
    first = list(range(1000, 1020))
    past.add(first)
    for _ in range(100):
        past.add([generator.randrange(50) for _ in range(30)])
        past.read(31)
        assert sum(each.num_tokens for each in past.automata) <= 200
    reader = PastReader(past)
    CopyIndex().extend(first[:5], EVERYTHING, past=reader)
    assert reader.find(1, 4) is None
    assert past.num_forgotten > 10


def test_a_reader_goes_on_when_what_it_stood_in_is_forgotten() -> None:
    past = PastOutputs(20)
    past.add([1, 2, 3, 4])
    past.read(EVERYTHING)
    reader, index, tokens = PastReader(past), CopyIndex(), [7, 1, 2]
    index.extend(tokens, EVERYTHING, past=reader)
    assert reader.find(2, 4) == copying.Copied([3, 4], 2)
    for _ in range(3):
        past.add([5, 1, 2, 6, 8, 8, 8, 8, 8])
        past.read(EVERYTHING)
    index.extend([*tokens, 6], EVERYTHING, past=reader)
    assert reader.find(2, 1) == copying.Copied([8], 3)
