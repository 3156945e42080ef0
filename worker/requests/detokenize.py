"""Incremental detokenization, which emits whole characters only, and the search for stop strings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoders emit it in place of incomplete characters
MAX_HELD_TOKENS = 32  # after this many tokens without a whole character, none will come
CONTEXT_TOKENS = 6  # last prompt tokens that are decoded too, since some tokenizers treat the first token differently
MAX_CONTEXT_TOKENS = 32  # the same, if the last tokens have no text or begin inside a character
SURROGATES = range(0xD800, 0xE000)

Decode = Callable[[Sequence[int]], str]
BYTE_OF = {char: byte for byte, char in bytes_to_unicode().items()}

FALLBACK_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def make_decode(tokenizer: Any, skip_special_tokens: bool) -> Decode:
    """The decoding function of a transformers tokenizer, without its clean-up of spaces, which joins several tokens."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return lambda ids: fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
    return lambda ids: tokenizer.decode(
        list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def special_texts(tokenizer: Any) -> dict[int, str]:
    """Text of each token that `skip_special_tokens` leaves out."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return {token: added.content for token, added in fast.get_added_tokens_decoder().items() if added.special}
    ids = list(tokenizer.all_special_ids)
    return dict(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True))


def make_token_bytes(tokenizer: Any) -> Callable[[int], bytes | None]:
    """A function that gives the bytes of a token, or None if its name in the vocabulary does not spell bytes.

    It is for tokens that are a part of a character, and so have no text. Byte-level BPE names every byte by a visible
    character (GPT-2), byte fallback by its number.
    """

    def token_bytes(token: int) -> bytes | None:
        name = tokenizer.convert_ids_to_tokens(token) or ""
        if (fallback := FALLBACK_BYTE.fullmatch(name)) is not None:
            return bytes([int(fallback[1], 16)])
        known = [BYTE_OF.get(char) for char in name]
        return bytes(byte for byte in known if byte is not None) if known and None not in known else None

    return token_bytes


class Detokenizer:
    """Text of an output as it grows.

    The concatenated results of `push` are the text of all tokens so far, without an incomplete character at the end, which
    `flush` returns. It does not matter how the tokens are divided among calls. Each call decodes only the last few tokens
    again. `tokenizers.DecodeStream` does the same, but fails on invalid bytes, never emits them, and takes no prompt.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the tokens that may still matter
        self._known = ""  # beginning of their text that is of the prompt, or has been returned
        self._num_old = 0  # number of these tokens whose text is known
        # Replacement characters for an incomplete character at the prompt's end, which the output may complete.
        self._prompt_rest = 0
        for token in prompt_context(decode, prompt_ids):
            self._push_one(token)
        if len(self._ids) > self._num_old:
            self._prompt_rest = len(decode(self._ids)) - len(self._known)

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens, and return the text that is certain now."""
        together = self._ids + list(ids)
        text = self._decode(together)
        is_plain = text.startswith(self._known) and REPLACEMENT not in text[len(self._known) :]
        if not is_plain or text.endswith(REPLACEMENT) or self._prompt_rest:
            # How invalid bytes are decoded depends on the text before them: one by one, any division gives the same text.
            return "".join([self._push_one(token) for token in ids])
        self._ids = together
        return self._settle(text)

    def flush(self) -> str:
        """The rest: an incomplete character, as the decoder renders it."""
        return self._advance(self._decode(self._ids))

    def _push_one(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.startswith(self._known):
            # Some decoders render a run of bytes as a whole or not at all: drop the known ones.
            del self._ids[: self._num_old]
            self._known, self._num_old, text = "", 0, self._decode(self._ids)
        if text.endswith(REPLACEMENT) and len(self._ids) - self._num_old <= MAX_HELD_TOKENS:
            # Perhaps an incomplete character. Later bytes cannot change the text before it.
            return self._advance(text.rstrip(REPLACEMENT))
        return self._settle(text)

    def _settle(self, text: str) -> str:
        """Accept the text of all tokens. From here on the newest ones suffice as context, if they have any text.

        If they have none they do not: a decoder that drops the first space would drop that of the next token.
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
            self._known = self._decode(self._ids)  # of the tokens that are left, or the next text would seem known
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
    """The last tokens of a prompt, enough of them to have some text and not to begin inside a character."""
    for num_tokens in range(CONTEXT_TOKENS, MAX_CONTEXT_TOKENS):
        context = prompt_ids[-num_tokens:]
        text = decode(context)
        if num_tokens >= len(prompt_ids) or (text and not text.startswith(REPLACEMENT)):
            return context
    return prompt_ids[-CONTEXT_TOKENS:]


class StopStrings:
    """Finds the first stop string, and holds text back while it may be the beginning of one.

    If special tokens are left out of the text, stop strings that contain them are searched in a text in which each such
    token is a mark: half a surrogate pair, which no text contains.
    """

    def __init__(self, stops: Sequence[str], include: bool, hidden: Mapping[int, str] = MappingProxyType({})) -> None:
        """include: True to leave the stop string in the text. hidden: as from `spelled_tokens`, if they are left out."""
        self._include = include
        self._held = ""  # with marks
        self._plain = {stop: stop for stop in stops}
        marks = dict(zip(sorted(set(hidden.values()), key=len, reverse=True), map(chr, SURROGATES), strict=False))
        self._unmarked = dict.fromkeys(map(ord, marks.values()))
        self._marks = {token: marks[text] for token, text in hidden.items() if text in marks}
        self._marked = {stop: with_marks(stop, marks) for stop in stops if any(text in stop for text in marks)}

    def mark(self, token: int) -> str:
        """Mark of a token, for `push`; "" unless it is a special token that a stop string contains."""
        return self._marks.get(token, "")

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Add text. Returns the text that can be emitted, and the stop string if one is complete: the text ends there.

        may_stop: False to ignore stop strings that end here; one that begins here may still be completed later.
        """
        num_old, marked = len(self._held), self._held + text
        text = self._without_marks(marked)
        num_searched = len(self._without_marks(marked[:num_old]))
        found = [(start, -len(stop), stop) for stop, start in matches(self._plain, text, num_searched)]
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
        """The text held back, at the end of the output."""
        held, self._held = self._held, ""
        return self._without_marks(held)

    def _without_marks(self, text: str) -> str:
        return text.translate(self._unmarked) if self._unmarked else text


def spelled_tokens(stops: Sequence[str], special: Mapping[int, str]) -> dict[int, str]:
    """The special tokens whose text is a part of a stop string. special: as from `special_texts`."""
    together = "".join(stops)
    return {token: text for token, text in special.items() if text in together} if together else {}


def with_marks(text: str, marks: Mapping[str, str]) -> str:
    """The text with special tokens replaced by their marks. marks: by the token's text, the longest first."""
    for special, mark in marks.items():
        text = text.replace(special, mark)
    return text


def matches(stops: Mapping[str, str], text: str, num_old: int) -> Iterator[tuple[str, int]]:
    """Stop strings that the text contains, with the place where each begins. stops: stop string to the text searched for.

    The first num_old characters were searched before and contain none.
    """
    for stop, searched in stops.items():
        start = text.find(searched, max(0, num_old - len(searched) + 1))
        if start >= 0:
            yield stop, start


def held_length(stops: Iterable[str], text: str) -> int:
    """Length of the longest suffix of the text that is a prefix of a stop string."""
    longest = 0
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0 and not stop.startswith(text[start:]):
            start = text.find(stop[0], start + 1)
        longest = max(longest, len(text) - start if start >= 0 else 0)
    return longest
