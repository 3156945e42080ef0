"""Token ids to text, token by token: whole characters only, and nothing that may belong to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders put where bytes of a character are missing
MAX_HELD_TOKENS = 32  # after so many that never became a character they are not going to
CONTEXT_TOKENS = 6  # tokens of the prompt that are decoded along: some tokenizers treat the first token differently

Decode = Callable[[Sequence[int]], str]


def make_decode(tokenizer: Any, skip_special_tokens: bool) -> Decode:
    """Decoding of a transformers tokenizer, without the clean-up of spaces, which looks at more than one token.

    Without a tokenizer all text is empty.
    """
    if tokenizer is None:
        return lambda ids: ""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return lambda ids: fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
    return lambda ids: tokenizer.decode(
        list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


class Detokenizer:
    """Text of one growing output. What `push` returned, put together, is the text of all tokens pushed so far but for
    an unfinished character at the end; `flush` gives that.

    Only the last few tokens are decoded again at each call.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])  # the tokens that may still matter
        # Text of self._ids that is known to the caller, being prompt or returned already.
        self._known = decode(self._ids).rstrip(REPLACEMENT) if self._ids else ""
        self._num_old = len(self._ids)  # of these tokens, those whose text is known

    def push(self, ids: Sequence[int]) -> str:
        """Text that became certain with these tokens."""
        self._ids += ids
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) and len(self._ids) - self._num_old <= MAX_HELD_TOKENS:
            # Perhaps half a character. Whatever is before it is certain: bytes that follow cannot change it.
            return self._advance(text.rstrip(REPLACEMENT))
        new = self._advance(text)
        # From here on the tokens since the last whole character are context enough.
        del self._ids[: self._num_old]
        self._known = self._decode(self._ids)
        self._num_old = len(self._ids)
        return new

    def flush(self) -> str:
        """What is left: an unfinished character, shown as the decoder shows it."""
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        new = text[len(self._known) :]
        if new:
            self._known = text
        return new


class StopStrings:
    """Holds text back while it may belong to a stop string, and finds the first stop string."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """include: leave the stop string in the text."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may be shown, and the stop string if one is complete: then the text ends there."""
        text = self._held + text
        found = [(text.index(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            start, _, stop = min(found)
            self._held = ""
            return text[: start + len(stop)] if self._include else text[:start], stop
        keep = self._held_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The text held back, once nothing can follow."""
        held, self._held = self._held, ""
        return held

    def _held_length(self, text: str) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[len(text) - length :]) for stop in self._stops):
                return length
        return 0
