"""Settings that all gRPC servers share, and gRPC's event loop side made safe to end."""

from __future__ import annotations

from functools import cache

from grpc import aio

# Of every server. Clients may ping as often as they like, with and without a call: by default gRPC cuts off those that
# ping every ten seconds. Load lets pings arrive in clumps, so that no limit on them is safe.
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a port shared in silence
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
]


@cache
def prepare_aio() -> None:
    """Keep gRPC's poller for the life of the process. To be called before anything of grpc.aio is made.

    When the last object of grpc.aio goes, gRPC ends its poller and waits for it. The poller wakes the event loop with one
    byte per event through a pair of sockets; under load some 280 bytes pile up, the pair is full, and the poller waits for
    a reader. If the loop has ended by then there is none, and the process hangs on its way out. With one more reference
    the poller is never ended; it is a daemon thread and goes with the process.

    The pair must stay as it is: sockets that do not block let all events through at once, and with 2,000 busy streams
    gRPC's server then cancels some of them.
    """
    aio.init_grpc_aio()  # type: ignore[attr-defined]  # left out of the published types
