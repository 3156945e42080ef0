"""Queues that requests pass before the engine: chat templates, long texts, new grammars, and slots of the batch.

Encoding a long text takes a second per megabyte and some hundred times its size in memory, and must not hold up the event
loop, on which every stream and the health checks run. Long texts are therefore encoded one at a time in a thread, and
callers take turns. A text far beyond the model's context is refused after its beginning has been encoded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from speclen.worker.frontend.fair_queue import FairQueue, ThreadQueue
from speclen.worker.frontend.grammars import Grammars
from speclen.worker.models.loading import ModelPair
from speclen.worker.requests.detokenize import make_decode
from speclen.worker.requests.request import TextTooLongError

SHORT_BYTES = (
    2048  # texts up to this size are encoded on the event loop: 2 ms, as long as a switch of threads under load
)
MAX_WAITING = 16  # long texts, each of at most a message's 4 MiB
TRIM_BYTES = 2**18  # after texts of this size, memory that glibc would keep is returned to the kernel
# Characters per token of the context. Of a longer text, this much is encoded first: if that alone has twice the tokens of
# the context, the text cannot fit.
PREFIX_CHARACTERS = 16


class TextEncoder:
    """Encodes texts as a call of the tokenizer does, long ones in a thread. For one event loop."""

    def __init__(self, tokenizer: Any, max_context_length: int) -> None:
        self.tokenizer = tokenizer
        self._max_context_length = max_context_length
        self._prefix_length = PREFIX_CHARACTERS * max_context_length
        self.long_texts = ThreadQueue("encoder", MAX_WAITING)
        # The first call sets truncation and padding, which must not happen while a thread uses the tokenizer.
        self._encode("")

    async def encode(
        self, text: str, caller: str, *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[int]:
        """Token ids of a text. any_length: True if it need not fit in the context.

        Raises TextTooLongError if it cannot fit, QueueFullError if too many long texts wait.
        """
        if len(text.encode()) <= SHORT_BYTES:
            return self._encode(text, add_special_tokens)
        if len(text) > self._prefix_length and not any_length:
            await self._check_prefix(text[: self._prefix_length], caller)
        return await self.long_texts.do(caller, self._encode, text, add_special_tokens)

    async def _check_prefix(self, prefix: str, caller: str) -> None:
        """Raise TextTooLongError if the beginning of a text has more than twice the tokens of the context."""
        num_tokens = len(await self.long_texts.do(caller, self._encode, prefix))
        if num_tokens > 2 * self._max_context_length:
            raise TextTooLongError(
                f"text has {num_tokens} tokens in its first {len(prefix)} characters, and the model's context holds "
                f"{self._max_context_length}: shorten it"
            )

    async def decode(self, ids: Sequence[int], caller: str) -> str:
        """Text of token ids, including special tokens. Raises QueueFullError if too many long calls wait."""
        decode = make_decode(self.tokenizer, skip_special_tokens=False)
        return decode(ids) if len(ids) <= SHORT_BYTES else await self.long_texts.do(caller, decode, ids)

    async def strings(self, ids: Sequence[int], caller: str) -> list[str]:
        """Name of each token in the vocabulary. Raises QueueFullError if too many long calls wait."""
        name = self.tokenizer.convert_ids_to_tokens
        named: list[str] = name(ids) if len(ids) <= SHORT_BYTES else await self.long_texts.do(caller, name, ids)
        return named

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # The call releases the interpreter while it encodes; the backend's `encode` does not.
        options = {} if add_special_tokens else {"add_special_tokens": False}
        ids = list(self.tokenizer(text, verbose=False, **options)["input_ids"])
        if len(text) >= TRIM_BYTES:
            give_memory_back()
        return ids


def give_memory_back() -> None:
    """Return freed memory to the kernel: encoding 4 MiB of text takes 600 MB, which glibc would keep."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return  # another C library


class Admission:
    """The queues of a worker. For one event loop.

    num_rows: slots of the engine. max_waiting: requests that may wait for a slot, here or in the engine. max_wait_s: see
    `FairQueue`.
    """

    def __init__(
        self, pair: ModelPair, max_context_length: int, num_rows: int, max_waiting: int, max_wait_s: float = 0.0
    ) -> None:
        self.encoder = TextEncoder(pair.tokenizer, max_context_length)
        # As many as may run or wait, so that a chat is not refused here if the queue for slots has room.
        self.templates = ThreadQueue("templates", num_rows + max_waiting)
        self.grammars = Grammars(pair.tokenizer, pair.vocab_size, pair.eos_token_ids, num_rows)
        # Some requests wait in the engine, so that a free slot is taken in the next step.
        num_ahead = min(max_waiting, max(1, num_rows // 4))
        full = f"{max_waiting} requests are waiting already, which is --max-waiting"
        self.fair_queue = FairQueue(num_rows + num_ahead, max_waiting - num_ahead, max_wait_s, full)

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return sum(stage.num_waiting for stage in self._stages)

    def expected_wait_s(self, caller: str) -> float:
        """Expected seconds that another request of the caller would wait in all queues."""
        return sum(stage.expected_wait_s(caller) for stage in self._stages)

    @property
    def _stages(self) -> tuple[FairQueue, ...]:
        return self.templates, self.encoder.long_texts, self.grammars.compiling, self.fair_queue

    def close(self) -> None:
        self.templates.close()
        self.encoder.long_texts.close()
        self.grammars.close()
