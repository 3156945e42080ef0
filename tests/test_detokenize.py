"""Pieces put together are the text of all tokens; no piece ends inside a character or shows part of a stop string."""

from __future__ import annotations

import itertools
import random

import pytest
import tiny_models
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from speclen.worker.engine.detokenize import REPLACEMENT, Detokenizer, StopStrings, make_decode

TEXTS = ["plain words, and more", "naïve café", "北京 и Москва", "🙂🙃 two", "tab\tnewline\n  spaces", "é"]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_put_together_are_the_text(text: str) -> None:
    ids = tiny_models.tokenizer().encode(text)
    detokenizer = Detokenizer(make_decode(tiny_models.tokenizer(), True))
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == text
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_any_cutting_into_steps_gives_the_same_text() -> None:
    ids = tiny_models.tokenizer().encode("a 🙂 é 北 z")
    for cuts in itertools.product([1, 2, 3], repeat=5):
        detokenizer, rest, text = Detokenizer(make_decode(tiny_models.tokenizer(), True)), list(ids), ""
        for cut in cuts:
            text += detokenizer.push(rest[:cut])
            rest = rest[cut:]
        text += detokenizer.push(rest)
        assert text == "a 🙂 é 北 z"


def test_random_tokens_give_what_the_tokenizer_gives() -> None:
    """Half characters and bytes that are no text at all included: then the decoder's replacement characters."""
    decode = make_decode(tiny_models.tokenizer(), True)
    generator = random.Random(0)
    for _ in range(300):
        ids = [generator.randrange(tiny_models.VOCAB_SIZE) for _ in range(generator.randrange(1, 30))]
        detokenizer = Detokenizer(decode)
        pieces = [detokenizer.push([token]) for token in ids]
        assert "".join(pieces) + detokenizer.flush() == decode(ids)


def test_a_character_begun_in_the_prompt_is_finished_in_the_output() -> None:
    ids = tiny_models.tokenizer().encode("🙂")
    assert len(ids) > 2
    detokenizer = Detokenizer(make_decode(tiny_models.tokenizer(), True), ids[:2])
    assert "".join(detokenizer.push([token]) for token in ids[2:]) == "🙂"


def sentencepiece_style() -> PreTrainedTokenizerFast:
    """Words begin with ▁, the first space is dropped, unknown characters are bytes: as in Llama 2 and Mistral."""
    words = ["<unk>", "▁the", "▁draft", "ing", "▁"] + [f"<0x{byte:02X}>" for byte in range(256)]
    bpe = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[], byte_fallback=True))
    bpe.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def test_spaces_between_words_survive_where_the_first_one_is_dropped() -> None:
    decode = make_decode(sentencepiece_style(), True)
    ids = [1, 2, 3, *(5 + byte for byte in " é".encode()), 1, 2]
    detokenizer = Detokenizer(decode)
    assert "".join(detokenizer.push([token]) for token in ids) == decode(ids) == "the drafting é the draft"
    # After a prompt, the first word keeps its space.
    assert Detokenizer(decode, [1, 2]).push([1]) == " the"


def test_characters_of_several_byte_tokens_may_follow_each_other() -> None:
    """Byte tokens in a row are decoded as one run there, which is no text at all until its last byte has come."""
    decode = make_decode(sentencepiece_style(), True)
    text = "é北🙂é"
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push([5 + byte]) for byte in text.encode()]
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)


def test_bytes_that_never_become_a_character_are_not_held_for_ever() -> None:
    detokenizer = Detokenizer(make_decode(tiny_models.tokenizer(), True))
    broken = tiny_models.tokenizer().encode("é")[:1]
    shown = "".join(detokenizer.push(broken) for _ in range(200))
    assert len(shown) > 150
    assert set(shown) == {REPLACEMENT}


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    ids = [tiny_models.EOS_ID, *tiny_models.tokenizer().encode("x")]
    assert Detokenizer(make_decode(tiny_models.tokenizer(), True)).push(ids) == "x"
    assert Detokenizer(make_decode(tiny_models.tokenizer(), False)).push(ids) == "<|endoftext|>x"


@pytest.mark.parametrize("stops", [("END",), ("ND!", "END"), ("aab", "ab"), ("\n\n",), ("xyz", "yz", "z")])
def test_stop_strings_are_found_whatever_the_pieces(stops: tuple[str, ...]) -> None:
    """Against str.find on the whole text, for every way of cutting it."""
    texts = ["abEND!cd", "aaab", "EN", "ENEND", "x\n\ny", "xxyzz", "nothing here", "E"]
    for text in texts:
        found = [text.find(stop) for stop in stops if stop in text]
        expected = text[: min(found)] if found else text
        for cuts in itertools.product([True, False], repeat=len(text) - 1):
            pieces, start = [], 0
            for at, cut in enumerate(cuts, start=1):
                if cut:
                    pieces.append(text[start:at])
                    start = at
            pieces.append(text[start:])
            matcher, shown, stop = StopStrings(stops, include=False), "", None
            for piece in pieces:
                new, stop = matcher.push(piece)
                shown += new
                assert text.startswith(shown)
                assert expected.startswith(shown)
                if stop is not None:
                    break
            assert (stop is not None) == bool(found)
            assert shown + ("" if stop else matcher.flush()) == expected


def test_the_stop_string_may_be_kept() -> None:
    matcher = StopStrings(("END",), include=True)
    assert matcher.push("ab EN") == ("ab ", None)
    assert matcher.push("D more") == ("END", "END")
