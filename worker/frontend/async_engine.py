"""The engine on an event loop: the one entry for gRPC and HTTP.

Requests wait here for their turn. Draining, or a failed engine, ends requests with an error; requests whose client does not
read, or has disconnected, are aborted.

Waking the event loop for every sequence of every step would take more of the shared interpreter than decoding does. So
outputs gather in a relay. The loop wakes at once for the first tokens of a sequence and for its end, otherwise once per
interval, or not at all where the caller gets everything at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from speclen.worker.engine.engine import Engine
from speclen.worker.frontend.admission import Admission
from speclen.worker.frontend.worker_metrics import RequestMetrics, RequestTimeline
from speclen.worker.requests.request import (
    DrainingError,
    EngineFailedError,
    FinishReason,
    GenerationRequest,
    GrammarFailedError,
    RequestFailedError,
    SequenceOutput,
    SlowReaderError,
)

# Largest number of a call's tokens that wait for its client: with 20 log probabilities each they take some 30 MB.
MAX_WAITING_TOKENS = 16_384
FAILURE_GRACE_S = 0.3  # for the last errors to reach their clients when the worker has failed
LOOK_S = 0.01  # between checks for the end of a request
# Tokens of one message: with twenty log probabilities each some 200 kB, which any client that reads takes in time.
MOST_AT_ONCE = 128


@dataclass(slots=True)
class OutputStream:
    """Outputs of one call, on the event loop.

    failure: the error that follows the last output. begun: its requests are queued; aborted: they were aborted before that;
    ending: the caller has disconnected. on_output: called with every output as it arrives. task: of the caller; it is
    cancelled when the caller gives up, although its prompt or grammar may still be in preparation. until_end: outputs
    between the first tokens and the end of a sequence need not wake the loop. num_tokens: in `waiting`; on_overflow: called
    once they exceed MAX_WAITING_TOKENS. wake_s: see `AsyncEngine.open`.
    """

    until_end: bool = False
    wake_s: float | None = None
    task: asyncio.Task[Any] | None = None
    waiting: list[SequenceOutput] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None
    num_tokens: int = 0
    begun: bool = False
    aborted: bool = False
    ending: bool = False
    on_output: Callable[[SequenceOutput], None] | None = None
    on_overflow: Callable[[], None] | None = None

    @property
    def is_given_up(self) -> bool:
        """True if the caller has disconnected, although the call has not ended."""
        return self.ending or (self.task is not None and self.task.cancelling() > 0)

    def put(self, output: SequenceOutput) -> None:
        self.waiting.append(output)
        self.num_tokens += len(output.token_ids)
        if self.on_output is not None:
            self.on_output(output)
        if not self.until_end or is_urgent(output):
            self.arrived.set()
        if self.num_tokens > MAX_WAITING_TOKENS and self.on_overflow is not None:
            self.on_overflow()

    def fail(self, error: Exception) -> None:
        """Make `next` raise the error after the last output. The first error counts."""
        self.failure = self.failure or error
        self.arrived.set()

    async def next(self) -> list[SequenceOutput]:
        """All outputs since the last call, in order. Waits for at least one, at most wake_s. Raises the failure."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.wake_s):
                await self.arrived.wait()
        if self.failure is not None and not self.waiting:
            raise self.failure
        if self.failure is None:
            self.arrived.clear()
        outputs, self.waiting, self.num_tokens = self.waiting, [], 0
        return outputs


def is_urgent(output: SequenceOutput) -> bool:
    """True for the first tokens of a sequence and for its end, for which callers wait."""
    return output.finish_reason is not None or output.num_steps <= 1


class OutputRelay:
    """Passes outputs from the engine's thread, which calls `put`, to streams on the event loop, many at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._gathered: deque[tuple[OutputStream, SequenceOutput]] = deque()
        self._scheduled = False  # a timed delivery is pending
        self._urgent = False  # an immediate delivery is pending

    def put(self, stream: OutputStream, output: SequenceOutput) -> None:
        self._gathered.append((stream, output))
        urgent = is_urgent(output)
        if urgent and not self._urgent:
            self._urgent = True
            self._call(self._deliver)
        elif not (urgent or self._scheduled or stream.until_end):
            self._scheduled = True
            self._call(lambda: self._loop.call_later(self._interval_s, self._deliver_timed))

    def _call(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(callback)

    def _deliver_timed(self) -> None:
        self._scheduled = False
        self._deliver()

    def _deliver(self) -> None:
        self._urgent = False
        while self._gathered:
            stream, output = self._gathered.popleft()
            stream.put(output)


class ActiveRequest:
    """A request from the queue to its end. leave: frees a place in the queue, given the time of its entry."""

    def __init__(
        self,
        request: GenerationRequest,
        stream: OutputStream,
        timeline: RequestTimeline,
        leave: Callable[[float], None],
    ) -> None:
        self.request = request
        self.stream = stream
        self.timeline = timeline
        self.ended = asyncio.Event()
        self.num_unadmitted = request.sampling.n  # sequences that are not admitted yet: the last ones
        self._admitted: dict[int, float] = {}  # by index, times of entry of the running ones
        self._leave = leave

    def enter(self, entered_at: float) -> None:
        """Note that the next sequence is admitted."""
        self._admitted[self.request.sampling.n - self.num_unadmitted] = entered_at
        self.num_unadmitted -= 1

    def saw(self, output: SequenceOutput) -> None:
        """Note an output of the request. Called with every one, in order, even if the client does not read."""
        self.timeline.saw(output)
        if output.finish_reason is None:
            return
        if output.index in self._admitted:
            self._leave(self._admitted.pop(output.index))
        if not self._admitted and not self.num_unadmitted:
            self.ended.set()

    def leave(self) -> None:
        """Free the remaining places."""
        while self._admitted:
            self._leave(self._admitted.popitem()[1])

    def abort_unadmitted(self) -> bool:
        """Abort the sequences that are not admitted yet. Returns True if there were any."""
        num_unadmitted, self.num_unadmitted = self.num_unadmitted, 0
        for index in range(self.request.sampling.n - num_unadmitted, self.request.sampling.n):
            self.stream.put(
                SequenceOutput(
                    *(self.request.request_id, index, (), ""),
                    finish_reason=FinishReason.ABORT,
                    num_prompt_tokens=len(self.request.prompt_ids),
                    made_at=time.monotonic(),
                )
            )
        return num_unadmitted > 0


class AsyncEngine:
    """The engine for one event loop. unread_timeout_s: time limit for a client that does not read its answer."""

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        metrics: RequestMetrics,
        stream_interval_s: float,
        unread_timeout_s: float,
    ) -> None:
        self.engine = engine
        self.admission = admission
        self.metrics = metrics
        self._relay = OutputRelay(asyncio.get_running_loop(), stream_interval_s)
        self._unread_timeout_s = unread_timeout_s
        self._open: dict[str, OutputStream] = {}  # by id of the call
        self._runs: dict[str, ActiveRequest] = {}  # by id of the request
        self._refusal: Exception | None = None  # of all new requests
        self._engine_ends = False  # requests do not wait for its last step

    @property
    def max_sequence_tokens(self) -> int:
        """Largest number of tokens, prompt and output, of a request that is alone on the worker."""
        return min(self.engine.max_context_length, self.engine.scheduler.max_sequence_tokens)

    @property
    def num_open(self) -> int:
        """Number of calls that wait, run, or are being answered."""
        return len(self._open)

    @property
    def serving(self) -> bool:
        """True while new requests are accepted."""
        return self._refusal is None and self.engine.failure is None

    def drain(self) -> None:
        """Refuse new requests; accepted ones continue to their end."""
        self._refusal = DrainingError("the worker is draining and takes no new requests")

    def fail(self, error: EngineFailedError) -> None:
        """End all requests and refuse new ones, both with the error."""
        self._refusal, self._engine_ends = error, True
        for stream in self._open.values():
            stream.fail(copy.copy(error))

    def stop(self) -> None:
        """Stop the engine after the running step, without waiting for its requests."""
        self._engine_ends = True
        self.engine.stop()

    def abort(self, request_id: str) -> bool:
        """End a running or waiting request. Returns False if the id is unknown.

        A request whose text is being encoded, or whose grammar is being compiled, ends when that is done.
        """
        if request_id in self._runs:
            return self.engine.abort(request_id) | self._runs[request_id].abort_unadmitted()
        being_made = self._open.get(request_id)
        if being_made is None or being_made.begun:
            return False
        being_made.aborted = True
        return True

    @contextlib.asynccontextmanager
    async def open(
        self, request_id: str, until_end: bool = False, wake_s: float | None = None
    ) -> AsyncIterator[OutputStream]:
        """Open a stream for the outputs of one call while the block runs. A drain waits for it.

        until_end: True if the caller gets everything at the end, so that the event loop need not wake before. wake_s:
        seconds without output after which `running` yields an empty group; None: never. If the id belongs to a request whose
        caller has given up, this may be a retry, and waits for the end of that request. Raises ValueError if the id is in
        use, DrainingError, or the engine's failure.
        """
        while (before := self._open.get(request_id)) is not None and before.is_given_up:
            await asyncio.sleep(LOOK_S)
        if self._refusal is not None:
            raise copy.copy(self._refusal)  # an error that is raised again keeps references to earlier calls
        if request_id in self._open:
            raise ValueError(f"request_id {request_id!r} is already running: choose another")
        stream = self._open[request_id] = OutputStream(until_end, wake_s, asyncio.current_task())
        try:
            yield stream
        finally:
            del self._open[request_id]

    @contextlib.asynccontextmanager
    async def running(
        self,
        requests: Sequence[GenerationRequest],
        stream: OutputStream,
        caller: str,
        arrived_at: float,
        patience_s: float = math.inf,
    ) -> AsyncIterator[AsyncIterator[Sequence[SequenceOutput]]]:
        """Run requests while the block runs. Yields an iterator over their outputs, which ends when all have ended.

        arrived_at: by time.monotonic. patience_s: the caller's deadline. The block begins once all requests are queued.
        Raises ValueError naming the field, QueueFullError, or the stream's failure; the iterator raises these, and
        RequestFailedError.
        """
        for one in requests:
            self.engine.check(one)
        leave, timeline = self.admission.fair_queue.leave, self.metrics.timeline
        runs = {
            one.request_id: ActiveRequest(one, stream, timeline(one.sampling.n, arrived_at), leave) for one in requests
        }
        stream.on_output = lambda output: runs[output.request_id].saw(output)
        tasks = [asyncio.create_task(self._run(run, caller, patience_s)) for run in runs.values()]
        try:
            await asyncio.sleep(0)  # after this, each request is in the engine, in the queue, or refused
            if stream.failure is not None:
                raise stream.failure
            yield self._outputs(stream, runs)
        finally:
            # This is reached early if the client disconnects or its deadline passes.
            stream.ending, stream.on_output = True, None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, run: ActiveRequest, caller: str, patience_s: float) -> None:
        """Run a request to its end. An error becomes the stream's failure."""
        run.stream.begun = True
        try:
            if run.stream.aborted:
                run.abort_unadmitted()
            else:
                await self._serve(run, caller, patience_s)
        except Exception as error:
            run.stream.fail(error)
        finally:
            run.timeline.abandon()

    async def _serve(self, run: ActiveRequest, caller: str, patience_s: float) -> None:
        """Admit the sequences one after another, and wait until all have ended or the request is aborted."""
        request_id, fair_queue = run.request.request_id, self.admission.fair_queue
        if request_id in self._runs:  # over HTTP the worker chooses request ids
            raise ValueError(f"request_id {request_id!r} is already running: choose another")
        self._runs[request_id] = run
        try:
            for sequence in self.engine.sequences(run.request, functools.partial(self._relay.put, run.stream)):
                entered_at = await fair_queue.enter(caller, patience_s, begun=sequence.index > 0)
                if not run.num_unadmitted:  # it was aborted
                    fair_queue.leave(entered_at)
                    break
                run.enter(entered_at)
                self.engine.enqueue([sequence])
            await run.ended.wait()
        finally:
            try:
                # Its id and its places stay taken until the engine has ended the request.
                while self.engine.abort(request_id) and not self._engine_ends and self.engine.failure is None:
                    await asyncio.sleep(LOOK_S)
            finally:
                run.leave()
                del self._runs[request_id]

    async def _outputs(
        self, stream: OutputStream, runs: dict[str, ActiveRequest]
    ) -> AsyncIterator[Sequence[SequenceOutput]]:
        while stream.waiting or not all(run.ended.is_set() for run in runs.values()):
            outputs = await stream.next()
            if not outputs:
                yield ()
            failed = [output for output in outputs if output.error is not None]
            good = [output for output in outputs if output.error is None] + [
                replace(output, finish_reason=None, error=None) for output in failed if output.token_ids
            ]
            for at, part in enumerate(in_parts(good)):
                if at:
                    await asyncio.sleep(0)  # outputs gathered for a slow client may take long to serialise
                yield part
            if failed:
                raise self.engine.failure or error_of(failed[0])

    @contextlib.asynccontextmanager
    async def reading(self, stream: OutputStream) -> AsyncIterator[None]:
        """Limit the time of one write. Raises SlowReaderError if the client does not read.

        Flow control buffers up to 4 MB with gRPC before a write has to wait.
        """
        try:
            async with asyncio.timeout(self._unread_timeout_s) as limit:

                def end_now() -> None:
                    if not limit.expired():  # otherwise it is ending already
                        limit.reschedule(0.0)

                stream.on_overflow = end_now
                yield
        except TimeoutError:
            self.metrics.worker.slow_readers.inc()
            raise SlowReaderError(
                f"nothing was read for {self._unread_timeout_s:g} s, or too many tokens were unread: the request has ended"
            ) from None
        finally:
            stream.on_overflow = None


def in_parts(outputs: Sequence[SequenceOutput]) -> Iterator[Sequence[SequenceOutput]]:
    """Divide outputs, in order, into messages of about MOST_AT_ONCE tokens."""
    begin = num_tokens = 0
    for at, output in enumerate(outputs, start=1):
        num_tokens += len(output.token_ids)
        if num_tokens >= MOST_AT_ONCE or at == len(outputs):
            yield outputs[begin:at]
            begin, num_tokens = at, 0


def error_of(output: SequenceOutput) -> Exception:
    """The error to raise for a sequence that failed."""
    if output.is_callers:
        return GrammarFailedError(str(output.error))
    return RequestFailedError(f"{output.error}: the request has ended, try it again")
