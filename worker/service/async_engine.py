"""The engine as an event loop uses it: what every edge of a worker needs, whatever it speaks.

Texts are encoded without holding up the loop, outputs come gathered, and whatever is left unfinished is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from speclen.worker.engine.detokenize import make_decode
from speclen.worker.engine.engine import Engine
from speclen.worker.engine.request import GenerationRequest, QueueFullError, SequenceOutput
from speclen.worker.service.relay import OutputRelay, OutputStream
from speclen.worker.service.request_metrics import RequestMetrics, RequestTimeline

Result = TypeVar("Result")

SHORT_TEXT = (
    2048  # characters or tokens; up to here encoding takes less time than changing threads while the engine computes
)
MAX_TEXTS_WAITING = 16  # longer ones, encoded one after the other


class AsyncEngine:
    """For one event loop. tokenizer: of transformers, or None: then only token ids can be sent."""

    def __init__(self, engine: Engine, tokenizer: Any, metrics: RequestMetrics, stream_interval_s: float) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.metrics = metrics
        self._relay = OutputRelay(asyncio.get_running_loop(), stream_interval_s)
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._num_texts = 0

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of prompt and output that a request alone on the worker may have."""
        engine = self.engine
        return min(engine.max_context_length, engine.scheduler.max_kv_tokens - engine.config.max_speculation_length)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Raises ValueError where there is no tokenizer, QueueFullError when too many long texts wait."""
        if self.tokenizer is None:
            raise ValueError("prompt is text, but the model has no tokenizer: send token ids")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("prompt holds half a character (a lone surrogate): send whole ones") from None
        if len(text) <= SHORT_TEXT:
            return self._encode(text, add_special_tokens)
        return await self._aside(self._encode, text, add_special_tokens)

    async def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included. Raises QueueFullError when too many long ones wait."""
        decode = make_decode(self.tokenizer, skip_special_tokens=False)
        return decode(ids) if len(ids) <= SHORT_TEXT else await self._aside(decode, ids)

    async def _aside(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run in the encoder's thread, after what waits there."""
        if self._num_texts >= MAX_TEXTS_WAITING:
            raise QueueFullError(f"{self._num_texts} long texts wait already: try again later")
        self._num_texts += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoder, function, *arguments)
        finally:
            self._num_texts -= 1

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The call lets go of the interpreter while it encodes; the backend's own `encode` would not.
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def close(self) -> None:
        self._encoder.shutdown(wait=False, cancel_futures=True)

    @contextlib.asynccontextmanager
    async def running(
        self, requests: Sequence[GenerationRequest], arrived_at: float | None = None
    ) -> AsyncIterator[AsyncIterator[list[SequenceOutput]]]:
        """Run requests for the length of the block. The value: their outputs as they come, until all have ended.

        Raises ValueError naming the field, QueueFullError or DrainingError, and then runs none. arrived_at: by
        time.monotonic, now if None.
        """
        stream = OutputStream()
        timelines = {one.request_id: self.metrics.timeline(one.sampling.n, arrived_at) for one in requests}
        submitted: list[str] = []
        try:
            for one in requests:
                self.engine.submit(one, functools.partial(self._relay.put, stream))
                submitted.append(one.request_id)
            yield self._outputs(stream, sum(one.sampling.n for one in requests), timelines)
        finally:
            # Reached early when the client went away; a request that has ended is not known any more.
            for request_id in submitted:
                self.engine.abort(request_id)
                timelines[request_id].abandon()

    async def _outputs(
        self, stream: OutputStream, num_unfinished: int, timelines: dict[str, RequestTimeline]
    ) -> AsyncIterator[list[SequenceOutput]]:
        while num_unfinished:
            outputs = await stream.next()
            now = time.monotonic()
            for output in outputs:
                timelines[output.request_id].saw([output], now)
                num_unfinished -= output.finish_reason is not None
            yield outputs
