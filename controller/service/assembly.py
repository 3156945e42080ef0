"""A controller put together from its configuration: store, estimator, journal, servers; nothing of it started yet."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from functools import partial

from grpc import aio

from speclen.controller.config import ControllerConfig
from speclen.controller.estimator import Contexts
from speclen.controller.service.intake import Intake
from speclen.controller.service.learner import Learner, Totals
from speclen.controller.service.registry import Registry
from speclen.controller.service.saving.journal import Journal
from speclen.controller.service.saving.restoring import restore, restore_guards
from speclen.controller.service.servicer import ControlServicer
from speclen.controller.service.streams import StreamSettings
from speclen.store.connection import StoreError
from speclen.store.database import Store, StoreConfig
from speclen.store.retention import Retention
from speclen.store.schema import StoredState
from speclen.transport.aio import SERVER_OPTIONS
from speclen.transport.health import Health
from speclen.transport.servers import create_server
from speclen.transport.supervision import Supervisor
from speclen.transport.version import installed_version
from speclen.v1 import control_pb2, control_pb2_grpc

SERVICE = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name

MAX_MESSAGE_BYTES = 4 * 2**20  # 1,024 reports of length 64 take 200 kB, the largest profile 2 MB
SPARE_CALLS = 1024  # unary calls in progress beside the streams
OPTIONS = [
    *SERVER_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    # What is read ahead per stream. It bounds memory (64 MB at 4,096 streams), and the time for which pings stay unread
    # when all streams send more than can be taken: what has arrived is worked off before the sockets are looked at.
    ("grpc.http2.lookahead_bytes", 16 * 1024),
    ("grpc.http2.bdp_probe", 0),
    # A vanished peer is noticed by its silence (StreamSettings.silence_s); pings are for connections without a stream.
    # Keepalive alone would take over a minute, hence the ping timeout; a short one would cut off workers under overload.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 40_000),
    ("grpc.http2.ping_timeout_ms", 40_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.http2.max_pings_without_data", 0),
]


@dataclass(slots=True)
class Running:
    """A controller that serves. supervisor: knows when it should not any more."""

    servicer: ControlServicer
    journal: Journal
    server: aio.Server
    port: int
    health: Health
    stored: StoredState
    supervisor: Supervisor


def open_store(config: ControllerConfig) -> Store:
    """The database, made if there is none. Raises ValueError."""
    retention = Retention(max_report_rows=config.keep_reports, max_days=config.keep_days)
    try:
        return Store.open(config.database, StoreConfig(retention=retention), config.move_corrupt_aside)
    except StoreError as error:
        raise ValueError(str(error)) from error


def create_service(config: ControllerConfig, store: Store, stored: StoredState) -> tuple[Intake, Learner]:
    """Estimator, registry and journal, as they were when the stored state was written. Raises ValueError."""
    estimator, totals = Contexts(), Totals()
    registry = Registry(time.time, config.max_workers, config.max_contexts)
    forgotten, set_aside = restore(estimator, registry, stored, store.path)
    journal = Journal(store, estimator, time.time, config.commit_interval_s, stored.last_profile_id)
    journal.note_events(set_aside)
    for context in forgotten:
        journal.note_context(context)
    learner = Learner(estimator, registry, journal, totals, stored.last_group_id)
    journal.note_events(restore_guards(learner.guards, registry, store.path))
    return Intake(registry, learner, journal, totals, time.time), learner


async def create(config: ControllerConfig, store: Store, stored: StoredState) -> Running:
    """Everything put together, nothing started. Raises what create_service and create_server raise."""
    intake, learner = create_service(config, store, stored)
    settings = StreamSettings(max_streams=config.max_streams, silence_s=config.silence_s)
    servicer = ControlServicer(intake, learner, settings, identity_of(config))
    add = partial(control_pb2_grpc.add_ControlServiceServicer_to_server, servicer)
    opened = await create_server(config.listen, SERVICE, add, config, OPTIONS, config.max_streams + SPARE_CALLS)
    return Running(servicer, learner.journal, *opened, stored, Supervisor())


def identity_of(config: ControllerConfig) -> control_pb2.ServerIdentity:
    """The identity of this process."""
    return control_pb2.ServerIdentity(
        run_id=config.run_id,
        database=str(config.database.resolve()),
        host=socket.gethostname(),
        process_id=os.getpid(),
        version=installed_version(),
    )
