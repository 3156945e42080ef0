"""Encoding of texts without holding up the event loop, on which every stream and the health checks run.

A long text takes a second per megabyte, and memory of some hundred times its size. So long ones are encoded one at a
time in a thread of their own, callers taking turns. A text far beyond the model's context is refused by its beginning.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from speclen.worker.requests.detokenize import make_decode
from speclen.worker.requests.request import TextTooLongError
from speclen.worker.service.fair_queue import Aside

SHORT_BYTES = 2048  # encoded on the loop: 2 ms, as long as changing threads while the engine computes
MAX_WAITING = 16  # long texts, each of at most a message's 4 MiB
TRIM_BYTES = 2**18  # from here on freed memory, which glibc keeps, is returned to the kernel
# Of a text longer than so many characters per token of the context, so much is encoded first: where that alone is twice
# too long, the rest cannot make it fit.
PREFIX_CHARACTERS = 16


class TextEncoder:
    """Encoding as by calling the tokenizer. For one event loop."""

    def __init__(self, tokenizer: Any, max_context_length: int) -> None:
        self.tokenizer = tokenizer
        self._max_context_length = max_context_length
        self._prefix_length = PREFIX_CHARACTERS * max_context_length
        self.aside = Aside("encoder", MAX_WAITING)  # of long texts
        # The first call sets truncation and padding, which must not change while a thread uses the tokenizer.
        self._encode("")

    async def encode(
        self, text: str, caller: str, *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[int]:
        """Token ids. any_length: of a text that need not fit in the context.

        Raises TextTooLongError for one that cannot fit, QueueFullError when too many long ones wait.
        """
        if len(text.encode()) <= SHORT_BYTES:
            return self._encode(text, add_special_tokens)
        if len(text) > self._prefix_length and not any_length:
            await self._check_prefix(text[: self._prefix_length], caller)
        return await self.aside.do(caller, self._encode, text, add_special_tokens)

    async def _check_prefix(self, prefix: str, caller: str) -> None:
        """Raises TextTooLongError for a text whose beginning has twice the tokens of the context."""
        num_tokens = len(await self.aside.do(caller, self._encode, prefix))
        if num_tokens > 2 * self._max_context_length:
            raise TextTooLongError(
                f"text has {num_tokens} tokens in its first {len(prefix)} characters, and the model's context holds "
                f"{self._max_context_length}: shorten it"
            )

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
        # The call releases the interpreter while it encodes; the backend's `encode` does not.
        options = {} if add_special_tokens else {"add_special_tokens": False}
        ids = list(self.tokenizer(text, verbose=False, **options)["input_ids"])
        if len(text) >= TRIM_BYTES:
            give_memory_back()
        return ids


def give_memory_back() -> None:
    """Return freed memory to the kernel: one text of 4 MiB takes 600 MB, which glibc would keep."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return  # another C library
