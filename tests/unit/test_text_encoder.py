"""Texts become the tokenizer's ids, the event loop goes on meanwhile, and what certainly cannot fit is refused first."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import speclen.worker.service.text_encoder
from speclen.worker.requests.request import QueueFullError
from speclen.worker.service.text_encoder import TextEncoder, longest_token_bytes
from tests.support import tiny_models


def run(test: Any) -> Any:
    return asyncio.run(asyncio.wait_for(test(), 30.0))


@pytest.mark.parametrize("text", ["", "short", "long " * 2000, "é北🙂" * 1000])
def test_ids_are_the_tokenizers(text: str) -> None:
    async def test() -> list[int]:
        return await TextEncoder(tiny_models.tokenizer(), 10**6).encode(text, "a")

    assert run(test) == tiny_models.tokenizer()(text)["input_ids"]


def test_the_event_loop_goes_on_while_long_texts_are_encoded() -> None:
    """On the loop, these two would let it turn a few times only; each takes more than half a second."""

    async def test() -> int:
        encoder = TextEncoder(tiny_models.tokenizer(), 10**7)
        texts = [asyncio.create_task(encoder.encode("held up? " * 60_000, "a")) for _ in range(2)]
        num_turns = 0
        while not all(task.done() for task in texts):
            await asyncio.sleep(0.001)
            num_turns += 1
        assert len({len(await task) for task in texts}) == 1
        return num_turns

    assert run(test) > 20


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


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    encoder = TextEncoder(tiny_models.tokenizer(), 256)
    encoder.tokenizer = None  # which nothing may ask
    with pytest.raises(ValueError, match="text has 4000000 bytes, too many for the model's context of 256 tokens"):
        await encoder.encode("x" * 4_000_000, "a")


def byte_level(normalizer: Any = None, split: Any = None, **token: bool) -> PreTrainedTokenizerFast:
    """All bytes and some longer tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: at for at, text in enumerate([*alphabet, "Ġthe", "ab", "abab", "ĠĠ", "Ã©"])}
    merges = [("a", "b"), ("ab", "ab"), ("Ġ", "Ġ"), ("Ã", "©")]
    one = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    one.pre_tokenizer = level if split is None else pre_tokenizers.Sequence([split, level])
    one.normalizer = normalizer
    one.decoder = decoders.ByteLevel()
    one.add_special_tokens([AddedToken("<|end|>", **token)])
    return PreTrainedTokenizerFast(tokenizer_object=one)


def byte_fallback() -> PreTrainedTokenizerFast:
    words = ["<unk>", "▁", "▁the", "ing", *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe = models.BPE(
        vocab={word: at for at, word in enumerate(words)},
        merges=[],
        byte_fallback=True,
        unk_token="<unk>",
        fuse_unk=True,
    )
    one = Tokenizer(bpe)
    one.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=one)


CERTAIN = {
    "bundled": tiny_models.tokenizer(),
    "plain": byte_level(),
    "nfc": byte_level(normalizers.NFC()),
    "digits": byte_level(split=pre_tokenizers.Digits(individual_digits=True)),
    "fallback": byte_fallback(),
}


@pytest.mark.parametrize("name", CERTAIN)
@given(st.text(st.characters(codec="utf-8") | st.sampled_from("ab e\u0301\u0308u\u1100\u1161\u11a8"), max_size=60))
def test_no_text_has_more_bytes_than_its_tokens_can_stand_for(name: str, text: str) -> None:
    longest = longest_token_bytes(CERTAIN[name])
    assert longest is not None
    assert len(text.encode()) <= longest * len(CERTAIN[name](text)["input_ids"])


@pytest.mark.parametrize(
    "tokenizer",
    [
        object(),
        byte_level(normalizers.NFKC()),
        byte_level(normalizers.Strip()),
        byte_level(normalizers.Replace("  ", " ")),
        byte_level(split=pre_tokenizers.Split(" ", "removed")),
        byte_level(rstrip=True),
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))),
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE({"<unk>": 0}, [], unk_token="<unk>", fuse_unk=True))
        ),
    ],
)
def test_where_text_may_vanish_nothing_is_certain(tokenizer: Any) -> None:
    assert longest_token_bytes(tokenizer) is None
