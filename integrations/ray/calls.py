"""Adapts a call that arrives through Ray Serve's gRPC proxy to the interface that our servicer expects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc

from speclen.process.credentials import Keyring

END = object()  # follows the last message


class CallEndedError(Exception):
    """The call ends with a status other than OK. The message is sent to the caller."""


class ServeCall:
    """The part of a gRPC context that `GenerationServicer` uses. outer: Serve's own context, which the proxy returns."""

    def __init__(self, outer: Any) -> None:
        self._outer = outer
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._done = False

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Does nothing: Serve sends its own metadata with the first message."""

    async def write(self, message: Any) -> None:
        """Returns once the message was taken and the next one is requested: a slow reader delays the writer."""
        self._messages.put_nowait(message)
        await self._messages.join()

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self._done = True
        self._outer.set_code(code)
        self._outer.set_details(details)
        raise CallEndedError(f"{code.name}: {details}")

    def done(self) -> bool:
        """True once the caller has received its status or has disconnected."""
        return self._done

    async def messages(self, work: Coroutine[Any, Any, None]) -> AsyncIterator[Any]:
        """Messages that `work` writes, until it ends. Passes on its errors, and cancels it when the caller disconnects."""
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._messages.put_nowait(END))
        try:
            while (message := await self._messages.get()) is not END:
                yield message
                self._messages.task_done()
            await task
        finally:
            self._done = True
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._outer.set_trailing_metadata(list(metadata))

    def time_remaining(self) -> float | None:
        """Unknown: Serve's proxies do not pass the deadline on; they cancel the call when it has passed."""
        return None

    def peer_identities(self) -> None:
        """None: TLS ends at the proxy."""

    def peer(self) -> str:
        return str(self._outer.peer())

    def invocation_metadata(self) -> Any:
        return self._outer.invocation_metadata()


def check_token(keyring: Keyring | None, outer: Any, insecure: bool) -> None:
    """Set the status and raise CallEndedError if the call carries none of the tokens.

    If there are no tokens, every call is refused unless insecure: Ray's gRPC proxy always listens on all interfaces.
    """
    if insecure if keyring is None else keyring.caller_in(outer.invocation_metadata()) is not None:
        return
    words = "send the metadata `authorization: Bearer TOKEN`"
    if keyring is None:
        words = "this fleet takes calls over gRPC only with a token: give it token_file, or insecure"
    outer.set_code(grpc.StatusCode.UNAUTHENTICATED)
    outer.set_details(words)
    raise CallEndedError(f"UNAUTHENTICATED: {words}")
