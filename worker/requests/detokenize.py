"""Incremental detokenization: whole characters only, and nothing that may belong to a stop string."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders put where bytes of a character are missing
MAX_HELD_TOKENS = 32  # after so many without a whole character none will come
CONTEXT_TOKENS = 6  # tokens of the prompt that are decoded along: some tokenizers treat the first token differently
SURROGATES = range(0xD800, 0xE000)
MAX_CONTEXT_TOKENS = 32  # where the last ones show no text, or begin inside a character

Decode = Callable[[Sequence[int]], str]
BYTE_OF = {char: byte for byte, char in bytes_to_unicode().items()}

FALLBACK_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def make_decode(tokenizer: Any, skip_special_tokens: bool) -> Decode:
    """Decoding of a transformers tokenizer, without the clean-up of spaces, which looks at more than one token."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return lambda ids: fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
    return lambda ids: tokenizer.decode(
        list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def special_texts(tokenizer: Any) -> dict[int, str]:
    """Texts of the tokens that `skip_special_tokens` leaves out, by token."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return {token: added.content for token, added in fast.get_added_tokens_decoder().items() if added.special}
    ids = list(tokenizer.all_special_ids)
    return dict(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True))


def make_token_bytes(tokenizer: Any) -> Callable[[int], bytes | None]:
    """A function from token to bytes, by the token's name in the vocabulary; None where that is no name for bytes.

    For tokens that are a part of a character, which have no text: byte-level BPE names every byte by a visible character
    (GPT-2), byte fallback by its number.
    """

    def token_bytes(token: int) -> bytes | None:
        name = tokenizer.convert_ids_to_tokens(token) or ""
        if (fallback := FALLBACK_BYTE.fullmatch(name)) is not None:
            return bytes([int(fallback[1], 16)])
        known = [BYTE_OF.get(char) for char in name]
        return bytes(byte for byte in known if byte is not None) if known and None not in known else None

    return token_bytes


class Detokenizer:
    """Text of one growing output. The results of `push`, concatenated, are the text of all tokens so far but for an
    unfinished character at the end, which `flush` returns. The division of tokens among calls does not matter.

    Each call decodes only the last few tokens again. `tokenizers.DecodeStream` does the same, but fails when a run of byte
    tokens is no text, holds such bytes for ever, and takes no prompt.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the tokens that may still matter
        self._known = ""  # text of self._ids that is known to the caller, being prompt or returned already
        self._num_old = 0  # of these tokens, those whose text is known
        # Replacement characters that show an unfinished one at the prompt's end: not the output's, unless it finishes that.
        self._prompt_rest = 0
        for token in prompt_context(decode, prompt_ids):
            self._push_one(token)
        if len(self._ids) > self._num_old:
            self._prompt_rest = len(decode(self._ids)) - len(self._known)

    def push(self, ids: Sequence[int]) -> str:
        """Text that is certain with these tokens."""
        together = self._ids + list(ids)
        text = self._decode(together)
        is_plain = text.startswith(self._known) and REPLACEMENT not in text[len(self._known) :]
        if not is_plain or text.endswith(REPLACEMENT) or self._prompt_rest:
            # How invalid bytes are shown depends on the text before: one by one, for all divisions alike.
            return "".join([self._push_one(token) for token in ids])
        self._ids = together
        return self._settle(text)

    def flush(self) -> str:
        """The rest: an unfinished character, as the decoder shows it."""
        return self._advance(self._decode(self._ids))

    def _push_one(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.startswith(self._known):
            # Some decoders accept a run of bytes as a whole or not at all: drop the known ones.
            del self._ids[: self._num_old]
            self._known, self._num_old, text = "", 0, self._decode(self._ids)
        if text.endswith(REPLACEMENT) and len(self._ids) - self._num_old <= MAX_HELD_TOKENS:
            # Perhaps half a character. Text before it is certain: later bytes cannot change it.
            return self._advance(text.rstrip(REPLACEMENT))
        return self._settle(text)

    def _settle(self, text: str) -> str:
        """Accept the text of all tokens. The newest ones are context enough from here on, if they show any text.

        Without text they are not: decoders that drop the first space would drop that of the next token.
        """
        new = self._advance(text)
        newest = self._ids[self._num_old :]
        text_of_newest = self._decode(newest)
        if text_of_newest:
            self._ids, self._known = newest, text_of_newest
        elif self._known and not new:
            del self._ids[self._num_old :]  # left out of the text, as special tokens are
        elif len(self._ids) > MAX_HELD_TOKENS:
            del self._ids[MAX_HELD_TOKENS:]
            self._known = self._decode(self._ids)  # of what is left: else what the next ones show would seem known
        self._num_old = len(self._ids)
        return new

    def _advance(self, text: str) -> str:
        new = text[len(self._known) :]
        if not new:
            return ""
        self._known = text
        num_foreign = min(self._prompt_rest, len(new) - len(new.lstrip(REPLACEMENT)))
        self._prompt_rest = 0
        return new[num_foreign:]


def prompt_context(decode: Decode, prompt_ids: Sequence[int]) -> Sequence[int]:
    """The last tokens of a prompt that show some text and do not begin inside a character."""
    for num_tokens in range(CONTEXT_TOKENS, MAX_CONTEXT_TOKENS):
        context = prompt_ids[-num_tokens:]
        text = decode(context)
        if num_tokens >= len(prompt_ids) or (text and not text.startswith(REPLACEMENT)):
            return context
    return prompt_ids[-CONTEXT_TOKENS:]


class StopStrings:
    """Holds text back while it may belong to a stop string, and finds the first stop string.

    Special tokens may be left out of the text. Stop strings are then also searched in the text with those that they name,
    where each is a mark: half a surrogate pair, which no text contains.
    """

    def __init__(self, stops: Sequence[str], include: bool, hidden: Mapping[int, str] = MappingProxyType({})) -> None:
        """include: leave the stop string in the text. hidden: of `spelled_tokens`, if these are left out."""
        self._include = include
        self._held = ""  # with marks
        self._plain = {stop: stop for stop in stops}
        marks = dict(zip(sorted(set(hidden.values()), key=len, reverse=True), map(chr, SURROGATES), strict=False))
        self._unmarked = dict.fromkeys(map(ord, marks.values()))
        self._marks = {token: marks[text] for token, text in hidden.items() if text in marks}
        self._marked = {stop: with_marks(stop, marks) for stop in stops if any(text in stop for text in marks)}

    def mark(self, token: int) -> str:
        """Mark of a special token that is left out of the text, for `push`: "" if no stop string has it."""
        return self._marks.get(token, "")

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Text that may be shown, and the stop string if this text completes one: then the text ends there.

        may_stop: False while stop strings are to be ignored; one that such text begins may still be completed later.
        """
        num_old, marked = len(self._held), self._held + text
        text = self._without_marks(marked)
        num_shown = len(self._without_marks(marked[:num_old]))
        found = [(start, -len(stop), stop) for stop, start in matches(self._plain, text, num_shown)]
        found += [
            (len(self._without_marks(marked[:start])), -len(stop), stop)
            for stop, start in matches(self._marked, marked, num_old)
        ]
        if found and may_stop:
            start, _, stop = min(found)
            self._held = ""
            return text[:start] + stop if self._include else text[:start], stop
        keep = held_length(self._plain.values(), text)
        first = len(marked) - max(keep, held_length(self._marked.values(), marked))
        while len(self._without_marks(marked[first:])) < keep:  # some of the last are marks
            first -= 1
        self._held = marked[first:]
        return self._without_marks(marked[:first]), None

    def flush(self) -> str:
        """The text held back, once nothing can follow."""
        held, self._held = self._held, ""
        return self._without_marks(held)

    def _without_marks(self, text: str) -> str:
        return text.translate(self._unmarked) if self._unmarked else text


def spelled_tokens(stops: Sequence[str], special: Mapping[int, str]) -> dict[int, str]:
    """The special tokens whose text is a part of a stop string. special: of `special_texts`, which may be thousands."""
    together = "".join(stops)
    return {token: text for token, text in special.items() if text in together} if together else {}


def with_marks(text: str, marks: Mapping[str, str]) -> str:
    """The text with a mark for each special token. marks: by the token's text, the longest first."""
    for special, mark in marks.items():
        text = text.replace(special, mark)
    return text


def matches(stops: Mapping[str, str], text: str, num_old: int) -> Iterator[tuple[str, int]]:
    """Stop strings in the text, and where each begins. stops: values are what is searched.

    None lies in the first num_old characters, which were searched before.
    """
    for stop, searched in stops.items():
        start = text.find(searched, max(0, num_old - len(searched) + 1))
        if start >= 0:
            yield stop, start


def held_length(stops: Iterable[str], text: str) -> int:
    """Length of the longest end of the text with which a stop string begins."""
    longest = 0
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0 and not stop.startswith(text[start:]):
            start = text.find(stop[0], start + 1)
        longest = max(longest, len(text) - start if start >= 0 else 0)
    return longest
