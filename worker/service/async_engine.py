"""The engine on an event loop: the one entry for gRPC and HTTP.

Requests wait here for their turn, and outputs come gathered. Draining and a failed engine end requests with an error;
clients that do not read are detected; unfinished requests are aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace

from speclen.worker.engine.engine import Engine
from speclen.worker.observing.metrics import RequestMetrics
from speclen.worker.requests.request import (
    DrainingError,
    EngineFailedError,
    GenerationRequest,
    GrammarFailedError,
    RequestFailedError,
    SequenceOutput,
    SlowReaderError,
)
from speclen.worker.service.admission import Admission
from speclen.worker.service.relay import OutputRelay, OutputStream, Run

FAILURE_GRACE_S = 0.3  # for the last errors to reach their clients when the worker has failed
LOOK_S = 0.01  # between two checks for the end of a request
# Tokens of one message: with twenty log probabilities each some 200 kB, which a client that reads takes in time.
MOST_AT_ONCE = 128


class AsyncEngine:
    """For one event loop. unread_timeout_s: after which a client that does not read loses its request."""

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
        self._runs: dict[str, Run] = {}  # by id of the request
        self._refusal: Exception | None = None  # of all new requests
        self._engine_ends = False  # requests do not wait for its last step

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of prompt and output that a request alone on the worker may have."""
        return min(self.engine.max_context_length, self.engine.scheduler.max_sequence_tokens)

    @property
    def num_open(self) -> int:
        """Calls that wait, run, or are being answered."""
        return len(self._open)

    @property
    def serving(self) -> bool:
        """True while requests are taken."""
        return self._refusal is None and self.engine.failure is None

    def drain(self) -> None:
        """Take no new requests; those accepted go on to their end."""
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
        """End a running or waiting request. Returns False for an unknown id.

        A request whose text is being encoded, or its grammar tried, ends as soon as that is done.
        """
        if request_id in self._runs:
            return self.engine.abort(request_id) | self._runs[request_id].abort_outside()
        being_made = self._open.get(request_id)
        if being_made is None or being_made.begun:
            return False
        being_made.aborted = True
        return True

    @contextlib.asynccontextmanager
    async def open(
        self, request_id: str, until_end: bool = False, wake_s: float | None = None
    ) -> AsyncIterator[OutputStream]:
        """A stream for the outputs of one call, for the length of the block, for which a drain waits.

        until_end: the caller gets everything at the end, so the event loop need not wake before. wake_s: seconds without
        output after which `running` gives an empty group; None: it waits. Waits for the end of a request of that id whose
        caller has given up: it may be a retry. Raises ValueError for an id in use, DrainingError, or the engine's failure.
        """
        while (before := self._open.get(request_id)) is not None and before.is_given_up:
            await asyncio.sleep(LOOK_S)
        if self._refusal is not None:
            raise copy.copy(self._refusal)  # a copy: an error that is raised again keeps references to earlier calls
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
        """Run requests for the length of the block. The value: their outputs, until all have ended.

        arrived_at: by time.monotonic. patience_s: the caller's deadline. The block begins once all have a place in the
        queue. Raises ValueError naming the field, QueueFullError, or the stream's failure; while outputs are read, these
        and RequestFailedError.
        """
        for one in requests:
            self.engine.check(one)
        leave, timeline = self.admission.fair_queue.leave, self.metrics.timeline
        runs = {one.request_id: Run(one, stream, timeline(one.sampling.n, arrived_at), leave) for one in requests}
        stream.on_output = lambda output: runs[output.request_id].saw(output)
        tasks = [asyncio.create_task(self._run(run, caller, patience_s)) for run in runs.values()]
        try:
            await asyncio.sleep(0)  # By now each is in the engine, in the queue, or refused.
            if stream.failure is not None:
                raise stream.failure
            yield self._outputs(stream, runs)
        finally:
            # Reached early when the client went away or its deadline passed.
            stream.ending, stream.on_output = True, None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, run: Run, caller: str, patience_s: float) -> None:
        """Run the request to its end; an error becomes the stream's failure."""
        run.stream.begun = True
        try:
            if run.stream.aborted:
                run.abort_outside()
            else:
                await self._serve(run, caller, patience_s)
        except Exception as error:
            run.stream.fail(error)
        finally:
            run.timeline.abandon()

    async def _serve(self, run: Run, caller: str, patience_s: float) -> None:
        """Admit one sequence after the other, until the engine is done with all or the request is aborted."""
        request_id, fair_queue = run.request.request_id, self.admission.fair_queue
        if request_id in self._runs:  # over HTTP the worker chooses request ids
            raise ValueError(f"request_id {request_id!r} is already running: choose another")
        self._runs[request_id] = run
        try:
            for sequence in self.engine.sequences(run.request, functools.partial(self._relay.put, run.stream)):
                entered_at = await fair_queue.enter(caller, patience_s, begun=sequence.index > 0)
                if not run.num_outside:  # it was aborted
                    fair_queue.leave(entered_at)
                    break
                run.enter(entered_at)
                self.engine.take([sequence])
            await run.ended.wait()
        finally:
            try:
                # Until the engine has ended the request, its id and its place are taken.
                while self.engine.abort(request_id) and not self._engine_ends and self.engine.failure is None:
                    await asyncio.sleep(LOOK_S)
            finally:
                run.leave()
                del self._runs[request_id]

    async def _outputs(self, stream: OutputStream, runs: dict[str, Run]) -> AsyncIterator[Sequence[SequenceOutput]]:
        while stream.waiting or not all(run.ended.is_set() for run in runs.values()):
            outputs = await stream.next()
            if not outputs:
                yield ()
            failed = [output for output in outputs if output.error is not None]
            told = [output for output in outputs if output.error is None] + [
                replace(output, finish_reason=None, error=None) for output in failed if output.token_ids
            ]
            for at, part in enumerate(in_parts(told)):
                if at:
                    await asyncio.sleep(0)  # outputs gathered for a slow client may take long to serialise
                yield part
            if failed:
                raise self.engine.failure or error_of(failed[0])

    @contextlib.asynccontextmanager
    async def reading(self, stream: OutputStream) -> AsyncIterator[None]:
        """Time limit of one write. Raises SlowReaderError when the client does not read.

        Flow control buffers some of it, up to 4 MB with gRPC, before a write has to wait.
        """
        try:
            async with asyncio.timeout(self._unread_timeout_s) as limit:

                def end_now() -> None:
                    if not limit.expired():  # it is ending already
                        limit.reschedule(0.0)

                stream.on_overflow = end_now
                yield
        except TimeoutError:
            self.metrics.worker.slow_readers.inc()
            raise SlowReaderError(
                f"nothing was read for {self._unread_timeout_s:g} s, or too many tokens waited to be: the request has ended"
            ) from None
        finally:
            stream.on_overflow = None


def in_parts(outputs: Sequence[SequenceOutput]) -> Iterator[Sequence[SequenceOutput]]:
    """Outputs in order, divided into messages of about MOST_AT_ONCE tokens."""
    begin = num_tokens = 0
    for at, output in enumerate(outputs, start=1):
        num_tokens += len(output.token_ids)
        if num_tokens >= MOST_AT_ONCE or at == len(outputs):
            yield outputs[begin:at]
            begin, num_tokens = at, 0


def error_of(output: SequenceOutput) -> Exception:
    """The error for the caller of a sequence that failed."""
    if output.is_callers:
        return GrammarFailedError(str(output.error))
    return RequestFailedError(f"{output.error}: the request has ended, try it again")
