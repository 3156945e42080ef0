"""Streamed pieces add up to the text of all tokens, and no piece ends inside a character."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from speclen.worker.http.answers import chat_logprobs
from speclen.worker.requests.detokenize import REPLACEMENT, Detokenizer, make_decode, make_token_bytes
from speclen.worker.requests.request import TokenLogprobs
from tests.support import tiny_models


@pytest.mark.parametrize("text", ["🙂 é北", "naïve", "tab\t\x85\xad"])
def test_the_bytes_of_tokens_put_together_are_the_texts(text):
    """Also of those that have no text by themselves, being a part of a character."""
    tokenizer = tiny_models.tokenizer()
    token_bytes = make_token_bytes(tokenizer)
    ids = tokenizer.encode(text)
    assert b"".join(token_bytes(token) or b"" for token in ids) == text.encode()
    told = chat_logprobs(ids, [TokenLogprobs(-1.0, (), ())] * len(ids), make_decode(tokenizer, False), token_bytes)
    assert bytes(byte for each in told["content"] for byte in each["bytes"]) == text.encode()


def numbered(*words: str) -> dict[str, int]:
    return {word: at for at, word in enumerate(words)}


def made(model: models.Model, decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    """A tokenizer with an end token."""
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def sentencepiece_style() -> PreTrainedTokenizerFast:
    """Words begin with ▁, the first space is dropped, unknown characters are bytes: as in Llama 2 and Mistral."""
    vocabulary = numbered("<unk>", "▁the", "▁draft", "ing", "▁", *(f"<0x{byte:02X}>" for byte in range(256)))
    strip = decoders.Strip(content=" ", left=1, right=0)
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return made(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True), decoder)


def test_bytes_that_never_form_a_character_are_emitted():
    detokenizer = Detokenizer(make_decode(tiny_models.tokenizer(), True))
    broken = tiny_models.tokenizer().encode("é")[:1]
    shown = "".join(detokenizer.push(broken) for _ in range(200))
    assert len(shown) > 150
    assert set(shown) == {REPLACEMENT}


@pytest.mark.parametrize("num_output", [0, 1, 2])
def test_half_a_character_at_the_end_of_the_prompt_is_not_emitted(num_output):
    half = tiny_models.tokenizer().encode("a🙂")[:-1]
    detokenizer = Detokenizer(make_decode(tiny_models.tokenizer(), True), half)
    output = tiny_models.tokenizer().encode("bc")[:num_output]
    assert "".join(detokenizer.push([token]) for token in output) + detokenizer.flush() == "bc"[:num_output]


def test_a_long_prompt_of_byte_tokens_is_not_cut_inside_a_character():
    """Six tokens of context would begin inside a character, and the whole run of bytes would not be text."""
    prompt = [5 + byte for byte in "北京北京é".encode()[:-1]]
    assert Detokenizer(make_decode(sentencepiece_style(), True), prompt).push([5 + "é".encode()[-1]]) == "é"


# Spaces between words and none before ##pieces, as in BERT; a mark at the end of words that becomes a space, but for the
# last word, as in GPT-1.
PIECES = numbered("[UNK]", "the", "draft", "##ing", "##s", ".", "a")
SPACED = numbered("<unk>", "▁the", "▁draft", "ing", "▁", "▁a", "s")
ENDED = numbered("<unk>", "the</w>", "draft", "ing</w>", "s</w>", "a</w>")
TOKENIZERS = {
    "byte level": tiny_models.tokenizer(),
    "sentencepiece": sentencepiece_style(),
    "word pieces": made(models.WordPiece(PIECES, unk_token="[UNK]"), decoders.WordPiece(cleanup=True)),
    "metaspace": made(models.BPE(SPACED, merges=[]), decoders.Metaspace()),
    "word ends": made(models.BPE(ENDED, merges=[]), decoders.BPEDecoder(suffix="</w>")),
}


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_text_is_independent_of_how_tokens_are_split(name, skip):
    """Random ids, a random part of them as prompt, in random steps; special tokens more often than others.

    If bytes are not text, all splits give the same result; otherwise they also agree with the tokenizer.
    """
    tokenizer, generator = TOKENIZERS[name], random.Random(f"{name} {skip}")
    decode, special = make_decode(tokenizer, skip), tokenizer.eos_token_id
    for _ in range(400):
        ids = [generator.choice([special, *range(len(tokenizer))]) for _ in range(generator.randrange(1, 24))]
        if generator.random() < 0.5:  # without bytes that are not text
            ids = [token for token in ids if REPLACEMENT not in decode([token])]
        at = generator.randrange(len(ids) + 1)
        texts = {cut_randomly(Detokenizer(decode, ids[:at]), ids[at:], generator) for _ in range(4)}
        assert len(texts) == 1, (ids[:at], ids[at:])
        if REPLACEMENT not in decode(ids):
            while REPLACEMENT in decode(ids[:at]):
                at -= 1  # a character that the output finishes
            assert texts == {decode(ids)[len(decode(ids[:at])) :]}, (ids[:at], ids[at:])


def cut_randomly(detokenizer: Detokenizer, ids: list[int], generator: random.Random) -> str:
    text, start = "", 0
    while start < len(ids):
        end = start + generator.choice([1, 1, 2, 3, 8])
        text += detokenizer.push(ids[start:end])
        start = end
    return text + detokenizer.flush()
