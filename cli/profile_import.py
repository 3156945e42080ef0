"""Import of a profile into the controller that owns a database: the running one, or one started for this call."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import grpc

from speclen.cli.support.client import Client, identity, owns
from speclen.cli.support.database import default_database, reading
from speclen.cli.support.output import UserError, user_errors
from speclen.controller.config import ControllerConfig
from speclen.controller.service.controller_server import running
from speclen.process.embedded import serving
from speclen.records import ContextKey, Profile
from speclen.store.backup import is_empty
from speclen.store.files import is_locked
from speclen.store.queries import contexts
from speclen.store.retention import KEEP_REPORTS
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from speclen.worker.models.naming import short_name
from speclen.worker.profiling.file import foreign_parts

TIMEOUT_S = 30.0


def import_request(profile: Profile, context: ContextKey) -> pb.ImportProfileRequest:
    """The request that seeds `context` with a profile."""
    return pb.ImportProfileRequest(
        context=pb.ContextKey(**context._asdict()),
        cells=[pb.ProfileCell(**cell._asdict()) for cell in profile.cells],
        survival=profile.survival,
        num_survival_rows=profile.num_survival_rows,
        source=profile.source[:256],
    )


@dataclass(frozen=True, slots=True)
class Destination:
    """Destination of a profile: the controller at an address, or else one started for this call on `db`."""

    db: Path
    address: str
    client: Client

    def __str__(self) -> str:
        return f"{self.db}, by the controller at {self.address}" if self.address else str(self.db)

    def take(self, request: pb.ImportProfileRequest) -> int:
        """Import the profile and return its id. Raises UserError if it is refused or cannot be stored."""
        if self.address:
            return send(request, self.address, self.client)
        with user_errors((ValueError, OSError)):
            return asyncio.run(send_to_own(request, self.db))


def find_destination(db: Path, controller: str, client: Client) -> Destination:
    """Find the controller that owns `db` before anything is measured or loaded. Raises UserError.

    controller: its address; "": the one that runs on `db`, or one started for this call, so that a profile always seeds
    the estimator in the same way. If --db was given, a controller of another database is refused.
    """
    named = db.absolute() != default_database().absolute()
    if not controller:
        if not is_locked(db):
            return Destination(db, "", client)
        if (published := serving(db)) is None:
            raise UserError(f"the controller that runs on {db} does not say where: give its address with --controller")
        controller, named = published.address, True
    with client.calling("controller", controller) as channel:
        found = identity(channel, "controller", timeout_s=5.0)
    if named and not owns(found, db):
        raise UserError(
            f"the controller at {controller} keeps {found.database}, not {db}: give --controller the "
            "address of the one that does" + ("" if is_locked(db) else ", or drop --controller, since none runs on it")
        )
    return Destination(Path(found.database), controller, client)


def only_context(db: Path, target: str, draft: str) -> ContextKey | None:
    """The context of these models if the database has exactly one; None otherwise, or if it is on another machine."""
    if is_empty(db):
        return None
    names = [short_name(target), short_name(draft) if draft else "none"]
    with reading(db) as connection:
        keys = [row.key for row in contexts(connection)]
    found = [key for key in keys if [name.partition("#")[0] for name in key.pair] == names]
    return found[0] if len(found) == 1 else None


async def send_to_own(request: pb.ImportProfileRequest, db: Path) -> int:
    """Import through a controller in this process. It deletes no reports: retention is the owning controller's to decide.

    Raises ValueError if the database is in use or unusable, OSError if it cannot store the profile.
    """
    db.parent.mkdir(parents=True, exist_ok=True)
    config = ControllerConfig(
        listen="127.0.0.1:0", db=db, keep_reports=KEEP_REPORTS.max_report_rows, keep_days=KEEP_REPORTS.max_days
    )
    async with (
        running(config) as controller,
        grpc.aio.insecure_channel(f"127.0.0.1:{controller.port}") as channel,
    ):
        try:
            response = await rpc.ControlServiceStub(channel).ImportProfile(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise ValueError(f"{db} does not take the profile: {error.details()}") from error
    return response.profile_id


def send(request: pb.ImportProfileRequest, address: str, client: Client) -> int:
    """Import through a running controller. Raises UserError if it does not answer, or refuses."""
    with client.calling("controller", address) as channel:
        return rpc.ControlServiceStub(channel).ImportProfile(request, timeout=TIMEOUT_S).profile_id


def check_same_context(path: Path, here: ContextKey) -> None:
    """Raise UserError naming every difference between the profile's context and this one."""
    if different := foreign_parts(path, pb.ContextKey(**here._asdict())):
        raise UserError(
            f"{path} was measured with {'; '.join(different)}: it does not describe this context; "
            "give --as-prior to use it as a starting point"
        )
