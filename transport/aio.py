"""gRPC's event loop side, made safe for a busy process."""

from __future__ import annotations

import socket
from functools import cache

from grpc import aio


@cache
def prepare_aio() -> None:
    """Start gRPC's poller in a way that cannot block. To be called once, before anything of grpc.aio is made.

    The poller wakes the event loop with one byte per event through a pair of sockets, and the loop reads one byte per
    round, whatever the number of events it finds. Under load some 280 bytes pile up, the pair is full, and the poller
    blocks: from then on the loop gets one event per round, and when it ends first, the poller never returns and the
    process hangs on its way out. Sockets that do not block lose bytes instead, of which there are enough. gRPC gives no
    access to the pair, but takes the default timeout of the moment at which it is made.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(1.0)
    try:
        aio.init_grpc_aio()  # type: ignore[attr-defined]  # left out of the published types
    finally:
        socket.setdefaulttimeout(before)
