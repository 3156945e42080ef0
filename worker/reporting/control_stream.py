"""The connection to a controller: finds it, registers the worker, sends reports, and receives tables and probes.

Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import grpc
import structlog
from grpc import aio

from speclen.process.embedded import EMBEDDED, OFF, EmbeddedController, FindController, at
from speclen.process.servers import prepare_aio
from speclen.process.settings import past_proxies
from speclen.process.supervision import until_one_fails
from speclen.records import StepRecord
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from speclen.worker.reporting.conversions import to_report

if TYPE_CHECKING:
    from speclen.worker.reporting.control_client import ControlClient

log = structlog.get_logger()

ReportCall = aio.StreamStreamCall[pb.StreamReportsRequest, pb.StreamReportsResponse]

# With keepalive alone, detecting a stopped peer takes more than a minute; with the ping timeout it takes seconds.
CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
]
MAX_PACE = 8  # keeps heartbeats at 8 s, as a controller closes streams after 30 s of silence
# Advice to the operator, by the status of the controller's refusal.
WAYS_OUT = {
    grpc.StatusCode.UNAVAILABLE: "start one there, or correct --controller; one with TLS needs --controller-ca",
    grpc.StatusCode.DEADLINE_EXCEEDED: "is --controller the right address?",
    grpc.StatusCode.UNAUTHENTICATED: "name the file with its token by --controller-token-file",
    grpc.StatusCode.UNIMPLEMENTED: "another program, or another version, answers there: correct --controller",
    grpc.StatusCode.FAILED_PRECONDITION: "another worker has the same --worker-id, or --run-id is another run's",
    grpc.StatusCode.INVALID_ARGUMENT: "worker and controller may be of different versions: install the same",
}
# Trailing header of the controller: if an epoch is refused as old, the newest epoch it knows of this worker.
NEWEST_EPOCH = "speclen-newest-epoch"


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Timing of the control stream, in seconds, and sizes of its messages."""

    flush_interval_s: float = 0.2  # between messages, each with the reports gathered since the last one
    # Replaces flush_interval_s after num_fresh_steps reports. A message costs both sides milliseconds, which is most of
    # the controller's use of shared cores.
    calm_interval_s: float = 0.5
    num_fresh_steps: int = 3000
    group_size: int = 256  # largest number of reports in a message; the protocol allows 1024
    max_buffered: int = 65_536  # reports kept until durable: about half an hour of steps at 40 a second
    heartbeat_s: float = 1.0  # an empty message is sent after a silence of this length
    silence_s: float = 5.0  # the stream is reopened if no answer arrives for this long
    retry_s: float = 0.5  # first pause before a reconnect; doubles up to max_retry_s
    max_retry_s: float = 5.0
    rpc_timeout_s: float = 5.0  # deadline of RegisterWorker


class StreamClosedError(Exception):
    """The controller closed the stream without an error."""


class ControlStream:
    """Connects to the controller again and again; `find` tells its address before every attempt."""

    def __init__(
        self,
        client: ControlClient,
        find: FindController,
        credentials: grpc.ChannelCredentials | None,
        metadata: Sequence[tuple[str, str | bytes]],
    ) -> None:
        self._client, self._find, self._credentials = client, find, credentials
        self._target = ""  # address of the newest attempt
        self._metadata = aio.Metadata(*metadata)
        self._last_answer = 0.0

    async def run(self) -> None:
        """Keep a stream open until cancelled."""
        prepare_aio()
        settings, logged = self._client.settings, ""
        pause = settings.retry_s
        while True:
            started = self._client.clock()
            reason = await self._converse_once()
            if self._client.connected:
                log.warning("controller lost, the last table stays in use", controller=self._target, reason=reason)
                self._client.lose_controller()
            elif (kind := reason.partition(":")[0]) != logged:  # once per reason
                logged, table = kind, self._client.table.source
                log.warning("no controller yet", controller=self._target, reason=reason, table=table)
            if self._client.clock() - started > settings.max_retry_s:
                pause = settings.retry_s
            await asyncio.sleep(pause)
            pause = min(2 * pause, settings.max_retry_s)

    async def _converse_once(self) -> str:
        """Run one connection, and return the reason for its end."""
        try:
            self._target = await self._find()
        except Exception as error:  # any reason for which it is not found may be temporary
            return str(error) or type(error).__name__
        try:
            options = [*CHANNEL_OPTIONS, *past_proxies(self._target)]
            async with (
                aio.secure_channel(self._target, self._credentials, options=options)
                if self._credentials
                else aio.insecure_channel(self._target, options=options)
            ) as channel:
                await self._converse(rpc.ControlServiceStub(channel))
        except grpc.RpcError as error:
            return reason_of(error, with_advice=not self._client.connected)
        except TimeoutError:
            return f"no answer for {self.silence_s:g} s"
        except StreamClosedError:
            pass
        return "closed by the controller"

    async def _converse(self, stub: rpc.ControlServiceAsyncStub) -> None:
        registered, client = await self._register(stub), self._client
        if registered.HasField("controller"):
            client.controller = registered.controller
        client.use_table(registered.table)
        client.use_sampling(registered.sample_every)
        client.buffer.forget_until(registered.durable_seq)
        self._last_answer = client.clock()
        log.info("joined the controller", durable_seq=registered.durable_seq, worker=client.card.worker_id)
        client.connected = True
        call = stub.StreamReports(metadata=self._metadata)
        try:
            await until_one_fails(self._send(call, registered.durable_seq), self._receive(call), self._watch())
        finally:
            call.cancel()

    async def _register(self, stub: rpc.ControlServiceAsyncStub) -> pb.RegisterWorkerResponse:
        """Register this incarnation; if a wrong clock made its epoch older than the last incarnation's, use a newer one."""
        try:
            response = await self._register_once(stub)
        except aio.AioRpcError as error:
            newest, card = error.trailing_metadata().get(NEWEST_EPOCH), self._client.card
            if self._client.has_registered or newest is None:
                raise
            # This incarnation is the newest, so the registered epoch is an earlier one's: its clock was ahead of ours.
            log.warning("the clock is behind that of this worker's last start", epoch=card.epoch, newest=newest)
            self._client.card = replace(card, epoch=int(newest) + 1)
            response = await self._register_once(stub)
        self._client.has_registered = True
        return response

    async def _register_once(self, stub: rpc.ControlServiceAsyncStub) -> pb.RegisterWorkerResponse:
        request, timeout_s = self._client.card.register_request(), self._client.settings.rpc_timeout_s
        return await stub.RegisterWorker(request, timeout=timeout_s, metadata=self._metadata)

    async def _send(self, call: ReportCall, durable_seq: int) -> None:
        """Write messages until the stream ends; `_receive` gets the reason.

        gRPC's request iterator is not used, since an error of ours in it would cancel the call silently.
        """
        async for request in self._requests(durable_seq):
            try:
                await call.write(request)
            except (grpc.RpcError, asyncio.InvalidStateError):
                return

    async def _requests(self, sent_seq: int) -> AsyncIterator[pb.StreamReportsRequest]:
        """Messages to send: the first one names the worker; groups of reports and heartbeats follow."""
        client = self._client
        yield pb.StreamReportsRequest(worker=client.card.identity())
        quiet_since = client.clock()
        while True:
            records = client.buffer.after(sent_seq, client.settings.group_size)
            if records or client.clock() - quiet_since >= self._heartbeat_s:
                yield pb.StreamReportsRequest(reports=self._to_reports(records))
                quiet_since = client.clock()
            if records:
                sent_seq = records[-1].seq
            if len(records) < client.settings.group_size:
                settings = client.settings
                calm_s = settings.calm_interval_s if sent_seq >= settings.num_fresh_steps else 0.0
                await asyncio.sleep(self._pace * max(settings.flush_interval_s, calm_s))

    @property
    def _pace(self) -> int:
        """Factor on the time between messages: a controller that samples reports wants fewer messages, too."""
        return min(self._client.buffer.sample_every, MAX_PACE)

    @property
    def _heartbeat_s(self) -> float:
        return self._pace * self._client.settings.heartbeat_s

    @property
    def silence_s(self) -> float:
        """Seconds without an answer, several messages long, after which the stream is closed."""
        return max(self._client.settings.silence_s, 3 * self._heartbeat_s)

    def _to_reports(self, records: Sequence[StepRecord]) -> list[pb.StepReport]:
        """Records as messages. A record that cannot be encoded would end every stream: it is dropped and counted."""
        reports = []
        for record in records:
            try:
                reports.append(to_report(record))
            except (ValueError, TypeError, KeyError) as error:
                self._client.buffer.num_dropped += 1
                log.error("a report cannot be encoded and is dropped", seq=record.seq, reason=str(error))
        return reports

    async def _receive(self, call: ReportCall) -> None:
        client = self._client
        async for response in call:
            self._last_answer = client.clock()
            if response.HasField("table"):
                client.use_table(response.table)
            client.use_sampling(response.sample_every)
            client.buffer.forget_until(response.durable_seq)
            client.use_probes(response.probes)
            if response.num_refused > client.num_refused:
                log.error("controller refused reports", num=response.num_refused, reason=response.last_refusal)
            client.num_refused = response.num_refused
        raise StreamClosedError

    async def _watch(self) -> None:
        """Raise TimeoutError once the controller has been silent for too long."""
        while self._client.clock() - self._last_answer < self.silence_s:
            await asyncio.sleep(self._client.settings.silence_s / 5)
        raise TimeoutError


def reason_of(error: grpc.RpcError, with_advice: bool) -> str:
    """Status and details of an error. with_advice: followed by advice, while no controller has been joined."""
    if not isinstance(error, aio.AioRpcError):
        return str(error)
    way_out = WAYS_OUT.get(error.code()) if with_advice else None
    return f"{error.code().name}: {error.details()}{f'; {way_out}' if way_out else ''}"


def controllers(addresses: str) -> list[str]:
    """The controller addresses in a comma-separated list; [] for the embedded controller or none."""
    return [each.strip() for each in addresses.split(",") if each.strip() and addresses not in (EMBEDDED, OFF)]


def finder(addresses: str, context: pb.ContextKey) -> FindController | None:
    """A function that finds the controller of a worker; None for a worker without one."""
    if addresses == EMBEDDED:
        return EmbeddedController().address
    address = controller_of(addresses, context)
    return at(address) if address else None


def controller_of(addresses: str, context: pb.ContextKey) -> str:
    """Address of the controller that serves a worker; "" for none. The order of the addresses does not matter.

    Controllers exchange nothing, so all workers that learn together, those of a model pair and device, need the same one.
    Rendezvous hashing (Thaler and Ravishankar 1998) gives the same answer on every machine, and few workers move when a
    controller is added.
    """
    shared = context.target, context.draft, context.device

    def score(address: str) -> bytes:
        return hashlib.sha256("\n".join([address, *shared]).encode()).digest()

    return max(controllers(addresses), key=score, default="")
