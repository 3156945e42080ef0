"""A worker's registration, the controller that it is for, and the timing of its control stream."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from speclen.records import Choice, Limits
from speclen.transport.embedded import EMBEDDED, OFF, EmbeddedController, FindController, at
from speclen.v1 import control_pb2 as pb
from speclen.worker.reporting.messages import to_choices


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Times in seconds."""

    flush_interval_s: float = 0.2  # delay of a report, to group several in a message
    # The same after num_fresh_steps. A message costs both sides milliseconds, which is most of what the controller takes
    # of shared cores.
    calm_interval_s: float = 0.5
    num_fresh_steps: int = 3000
    group_size: int = 256  # reports per message at most; the protocol allows 1024
    max_buffered: int = 65_536  # reports kept until durable: about half an hour of steps at 40 a second
    heartbeat_s: float = 1.0  # an empty message is sent after a silence of this long
    silence_s: float = 5.0  # without an answer for this long the stream is reopened
    retry_s: float = 0.5  # first pause before a reconnect; doubles up to max_retry_s
    max_retry_s: float = 5.0
    rpc_timeout_s: float = 5.0  # deadline of RegisterWorker


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """A worker's registration.

    probe_steps, transition_steps: as in pb.WorkerLimits. evaluates: True if finished outputs tell tokens per step of every
    arm. baseline: arms that would be used without learning; empty if nothing is to be compared with them.
    """

    worker_id: str
    epoch: int
    context: pb.ContextKey
    limits: Limits
    address: str
    policy: str
    run_id: str = ""
    probe_steps: int = 3
    evaluates: bool = True
    transition_steps: int = 4
    baseline: tuple[Choice, ...] = ()

    def identity(self) -> pb.WorkerIdentity:
        return pb.WorkerIdentity(worker_id=self.worker_id, epoch=self.epoch)

    def limits_message(self) -> pb.WorkerLimits:
        return pb.WorkerLimits(
            **self.limits._asdict(), probe_steps=self.probe_steps, transition_steps=self.transition_steps
        )

    def register_request(self) -> pb.RegisterWorkerRequest:
        return pb.RegisterWorkerRequest(
            worker=self.identity(),
            context=self.context,
            limits=self.limits_message(),
            address=self.address,
            policy=self.policy,
            run_id=self.run_id,
            baseline=to_choices(self.baseline),
        )


def controllers(addresses: str) -> list[str]:
    """HOST:PORT, one or several with commas between; none for none, and for the embedded one."""
    return [each.strip() for each in addresses.split(",") if each.strip() and addresses not in (EMBEDDED, OFF)]


def finder(addresses: str, context: pb.ContextKey) -> FindController | None:
    """Finds the controller of a worker; None for a worker without one."""
    if addresses == EMBEDDED:
        return EmbeddedController().address
    address = controller_of(addresses, context)
    return at(address) if address else None


def controller_of(addresses: str, context: pb.ContextKey) -> str:
    """The controller of a worker; "" for none. The order of the addresses does not matter.

    Rendezvous hashing (Thaler and Ravishankar 1998): the same on every machine, and few workers move when a controller is
    added. Controllers exchange nothing, so workers that learn together need the same one: all of a pair and device.
    """
    shared = context.target, context.draft, context.device

    def score(address: str) -> bytes:
        return hashlib.sha256("\n".join([address, *shared]).encode()).digest()

    return max(controllers(addresses), key=score, default="")
