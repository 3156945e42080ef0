"""Grammars are tried in a separate process: a slow, deep or large one affects no other request."""

import asyncio
import contextlib
import json
import os
import resource
from typing import Any

import pytest

from speclen.worker.frontend import grammars
from speclen.worker.frontend.grammars import Grammars, StructuredOutput
from speclen.worker.requests.request import QueueFullError
from speclen.worker.sampling.grammar import Grammar
from tests.support import tiny_models

pytest.importorskip("llguidance")

MANY_FILES = 1100  # more than select.select knows


def preparing(**settings: Any) -> contextlib.closing[Grammars]:
    return contextlib.closing(
        Grammars(tiny_models.tokenizer(), tiny_models.VOCAB_SIZE, [tiny_models.EOS_ID], **settings)
    )


def deep() -> StructuredOutput:
    """Overflows the library's stack: in the worker's own process that would be its end."""
    rules = "\n".join(f"r{at}: r{at + 1}" for at in range(4000))
    return StructuredOutput("grammar", f'start: r0\n{rules}\nr4000: "a"')


def slow() -> StructuredOutput:
    """Seventeen seconds and 300 MB for sixty characters."""
    return StructuredOutput("json_schema", '{"type": "integer", "multipleOf": 999983}')


async def test_a_slow_grammar_is_refused_without_blocking_the_loop():
    with preparing(trial_s=1.0) as prepared:
        await prepared.prepare(StructuredOutput("regex", "a"), "warm")
        task = asyncio.create_task(prepared.prepare(slow(), "a"))
        num_turns = 0
        while not task.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        with pytest.raises(ValueError, match=r"'{\"type\": \"integer\", \"multipleOf\": 999983}' .* more than 1 s"):
            await task
        assert num_turns > 20
        await prepared.prepare(StructuredOutput("regex", "[ab]"), "a")


async def test_grammars_are_tried_with_many_open_files():
    """Story: with 1,000 connections no grammar could be tried, and none later either."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most[1] < MANY_FILES + 100:
        pytest.skip(f"no more than {most[1]} files may be open")

    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most[0], MANY_FILES + 100), most[1]))
    try:
        with contextlib.ExitStack() as files:
            for _ in range(MANY_FILES):
                files.enter_context(open(os.devnull))  # noqa: ASYNC230
            await files.enter_context(preparing()).prepare(StructuredOutput("regex", "[ab]"), "a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


async def test_a_grammar_that_crashes_its_trial_is_refused():
    with preparing() as prepared:
        await prepared.prepare(StructuredOutput("regex", "a"), "warm")
        with pytest.raises(ValueError, match="too deep or too large"):
            await prepared.prepare(deep(), "a")
        await prepared.prepare(StructuredOutput("regex", "b"), "a")


async def test_a_cancelled_trial_does_not_answer_for_the_next_one():
    """Its answer must not be mistaken for that of the next grammar."""
    with preparing() as prepared:
        await prepared.prepare(StructuredOutput("regex", "a"), "warm")
        task = asyncio.create_task(prepared.prepare(slow(), "a"))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(ValueError, match="unclosed"):
            await prepared.prepare(StructuredOutput("regex", "("), "b")
        await prepared.prepare(StructuredOutput("regex", "b"), "b")


async def test_prepared_grammars_are_cached_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(grammars, "MAX_CACHED", 3)

    with preparing() as prepared:

        async def again(number: int) -> Grammar:
            return await prepared.prepare(StructuredOutput("regex", str(number), field="elsewhere"), "a")

        made = {number: await again(number) for number in (0, 1, 2)}
        for number in (0, 3, 0, 4):
            made[number] = await again(number)
        assert [await again(number) is made[number] for number in (3, 0, 4, 1)] == [True, True, True, False]


async def test_too_many_new_grammars_at_once_are_refused(monkeypatch):
    with preparing() as prepared:
        wanted = [StructuredOutput("regex", f"a{number}") for number in range(grammars.MAX_WAITING + 4)]
        found = await asyncio.gather(*[prepared.prepare(one, "a") for one in wanted], return_exceptions=True)
        assert sum(isinstance(one, QueueFullError) for one in found) == 3
        assert not any(isinstance(one, BaseException) and not isinstance(one, QueueFullError) for one in found)


async def test_a_grammar_larger_than_its_share_of_memory_is_refused(monkeypatch):
    """Each sequence copies its grammar, so the limit is a share of the memory."""
    monkeypatch.setattr(grammars, "MAX_BYTES", 4 * 2**18)
    monkeypatch.setattr(grammars, "LEAST_BYTES", 0)

    with preparing(num_rows=4) as prepared:
        await prepared.prepare(StructuredOutput("choice", '["a", "b"]'), "a")
        words = json.dumps([f"word {at} of {at * 7919 % 100_003}" for at in range(2_500)])
        with pytest.raises(ValueError, match=r"takes .* MiB, and may take 0"):
            await prepared.prepare(StructuredOutput("choice", words), "a")
