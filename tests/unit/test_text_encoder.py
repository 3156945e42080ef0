"""Texts become the tokenizer's ids, the event loop goes on meanwhile, and what certainly cannot fit is refused first."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import speclen.worker.service.text_encoder
from speclen.worker.requests.request import QueueFullError
from speclen.worker.service.text_encoder import TextEncoder
from tests.support import tiny_models


def run(test: Any) -> Any:
    return asyncio.run(asyncio.wait_for(test(), 30.0))


@pytest.mark.parametrize("text", ["", "short", "long " * 2000, "é北🙂" * 1000])
def test_ids_are_the_tokenizers(text: str) -> None:
    async def test() -> list[int]:
        return await TextEncoder(tiny_models.tokenizer(), 10**6).encode(text, "a")

    assert run(test) == tiny_models.tokenizer()(text)["input_ids"]


class SlowTokenizer:
    """Takes until it is told."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.num_at_once = self.most_at_once = 0

    def __call__(self, text: str, verbose: bool) -> dict[str, list[int]]:
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        assert not text or self.go.wait(10)
        self.num_at_once -= 1
        return {"input_ids": [len(text)]}


async def test_long_texts_wait_for_each_other_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speclen.worker.service.text_encoder, "MAX_WAITING", 2)

    tokenizer = SlowTokenizer()
    encoder = TextEncoder(tokenizer, 100)
    long = "x" * 5000
    tasks = [asyncio.create_task(encoder.encode(long, "a")) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert encoder.aside.num_waiting == 2
    with pytest.raises(QueueFullError):
        await encoder.encode(long, "a")
    tokenizer.go.set()
    assert await asyncio.gather(*tasks) == [[5000]] * 3
    assert tokenizer.most_at_once == 1


async def test_a_text_that_cannot_fit_is_refused_by_its_beginning() -> None:
    encoder = TextEncoder(tiny_models.tokenizer(), 256)
    longest, encode = 0, encoder.tokenizer

    def watched(text: str, **options: Any) -> Any:
        nonlocal longest
        longest = max(longest, len(text))
        return encode(text, **options)

    encoder.tokenizer = watched
    with pytest.raises(ValueError, match="tokens in 4096 characters: the model's context holds 256"):
        await encoder.encode("x" * 4_000_000, "a")
    assert longest == 4096
