"""Texts to token ids without holding up the event loop, on which every stream and the health checks run.

A long text takes a second per megabyte, and memory of some hundred times its size. So long ones are encoded one at a
time in a thread of their own, callers taking turns, and a text that cannot fit in the model's context is refused before,
where that is certain.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from speclen.worker.requests.detokenize import make_decode
from speclen.worker.requests.request import TextTooLongError
from speclen.worker.service.aside import Aside

SHORT_BYTES = 2048  # encoded in place: 2 ms, no more than it would take to change threads while the engine computes
MAX_WAITING = 16  # long texts, each of at most a message's 4 MiB
TRIM_BYTES = 2**18  # from here on memory is given back after encoding, which glibc would keep
NFC_FACTOR = 3  # composing characters makes a text in UTF-8 at most so many times shorter (Unicode's NFC FAQ)


class TextEncoder:
    """Encodes as the tokenizer does when called with a text. For one event loop."""

    def __init__(self, tokenizer: Any, max_context_length: int) -> None:
        self.tokenizer = tokenizer
        self._max_context_length = max_context_length
        longest = longest_token_bytes(tokenizer)
        self._max_bytes = None if longest is None else longest * max_context_length
        self.aside = Aside("encoder", MAX_WAITING)  # of long texts
        # The first call sets truncation and padding of the tokenizer, which must not change while a thread uses it.
        self._encode("")

    async def encode(
        self, text: str, caller: str, *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[int]:
        """Token ids. any_length: of a text that need not fit in the context.

        Raises TextTooLongError for one that cannot fit, ValueError for half characters, QueueFullError when too many long
        ones wait.
        """
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise ValueError("prompt holds half a character (a lone surrogate): send whole ones") from None
        if num_bytes <= SHORT_BYTES:
            return self._encode(text, add_special_tokens)
        if self._max_bytes is not None and num_bytes >= self._max_bytes and not any_length:
            raise TextTooLongError(
                f"text has {num_bytes} bytes, too many for the model's context of {self._max_context_length} tokens"
            )
        return await self.aside.do(caller, self._encode, text, add_special_tokens)

    async def decode(self, ids: Sequence[int], caller: str) -> str:
        """Text of token ids, special tokens included. Raises QueueFullError when too many long ones wait."""
        decode = make_decode(self.tokenizer, skip_special_tokens=False)
        return decode(ids) if len(ids) <= SHORT_BYTES else await self.aside.do(caller, decode, ids)

    async def strings(self, ids: Sequence[int], caller: str) -> list[str]:
        """The vocabulary's name of each token. Raises QueueFullError when too many long ones wait."""
        name = self.tokenizer.convert_ids_to_tokens
        named: list[str] = name(ids) if len(ids) <= SHORT_BYTES else await self.aside.do(caller, name, ids)
        return named

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # The call lets go of the interpreter while it encodes; the backend's `encode` would not.
        options = {} if add_special_tokens else {"add_special_tokens": False}
        ids = list(self.tokenizer(text, verbose=False, **options)["input_ids"])
        if len(text) >= TRIM_BYTES:
            give_memory_back()
        return ids


def give_memory_back() -> None:
    """Let glibc return what it holds free: one text of 4 MiB takes 600 MB, which it would keep for the next one."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return  # Another C library, which does as it does.


def longest_token_bytes(tokenizer: Any) -> int | None:
    """Bytes of text in UTF-8 that one token stands for at most; None where no such bound is certain.

    Certain is it for BPE that knows every byte and whose other parts drop nothing of the text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = json.loads(backend.to_str())
    factor = _shrinking(parts["normalizer"])
    added = parts["added_tokens"]
    if factor is None or not _splits_only(parts["pre_tokenizer"]) or any(t["lstrip"] or t["rstrip"] for t in added):
        return None
    model = parts["model"]
    vocab = model.get("vocab")
    if model.get("type") != "BPE" or not _knows_every_byte(model, vocab, parts["pre_tokenizer"]):
        return None
    return factor * max(len(token.encode()) for token in [*vocab, *(t["content"] for t in added)])


def _children(part: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return part[name] if part["type"] == "Sequence" else [part]


def _shrinking(normalizer: dict[str, Any] | None) -> int | None:
    """Factor by which a text may become shorter; None if unknown."""
    if normalizer is None:
        return 1
    factor = 1
    for part in _children(normalizer, "normalizers"):
        if part["type"] == "NFC":
            factor *= NFC_FACTOR
        elif part["type"] == "Replace":
            pattern = part["pattern"].get("String")
            if pattern is None or len(part["content"].encode()) < len(pattern.encode()):
                return None
        elif part["type"] != "Prepend":
            return None
    return factor


def _splits_only(pre_tokenizer: dict[str, Any] | None) -> bool:
    """True if nothing of the text is lost between words."""
    if pre_tokenizer is None:
        return True
    kept = {"ByteLevel", "Digits", "Metaspace"}
    parts = _children(pre_tokenizer, "pretokenizers")
    return all(part["type"] in kept or (part["type"] == "Split" and part["behavior"] != "Removed") for part in parts)


def _knows_every_byte(model: dict[str, Any], vocab: dict[str, int], pre_tokenizer: dict[str, Any] | None) -> bool:
    """Otherwise any length of unknown text may become one token."""
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    parts = [] if pre_tokenizer is None else _children(pre_tokenizer, "pretokenizers")
    return any(p["type"] == "ByteLevel" for p in parts) and vocab.keys() >= set(ByteLevel.alphabet())
