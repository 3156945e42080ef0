"""Texts become the tokenizer's ids, the event loop goes on meanwhile, and what certainly cannot fit is refused first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from speclen.worker.service.text_encoder import TextEncoder
from tests.support import tiny_models


def run(test: Any) -> Any:
    return asyncio.run(asyncio.wait_for(test(), 30.0))


@pytest.mark.parametrize("text", ["", "short", "long " * 2000, "é北🙂" * 1000])
def test_ids_are_the_tokenizers(text: str) -> None:
    async def test() -> list[int]:
        return await TextEncoder(tiny_models.tokenizer(), 10**6).encode(text, "a")

    assert run(test) == tiny_models.tokenizer()(text)["input_ids"]


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
