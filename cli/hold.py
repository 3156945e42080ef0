"""`speclen hold`: uses a given arm at a batch range, whatever is learned, until it is released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from speclen.cli.support.client import client_from
from speclen.cli.support.database import DB_OPTION
from speclen.cli.support.flags import flags_from, ranges
from speclen.cli.support.output import UserError, user_errors
from speclen.process.credentials import ClientSecurity
from speclen.process.embedded import serving
from speclen.records import MAX_BATCH_SIZE, parse_arm
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc

TIMEOUT_S = 10.0


@flags_from(ClientSecurity)
def hold(
    batch: str = typer.Option(f"1-{MAX_BATCH_SIZE}", help="Batch sizes, such as 8-16."),
    arm: str = typer.Option("", help="Arm to use there, such as 'draft 2', plain or n-gram."),
    baseline: bool = typer.Option(False, "--baseline", help="Use the arms of each worker's baseline."),
    release: bool = typer.Option(False, "--release", help="Use what is learned again, at all batch sizes."),
    controller: str = typer.Option("", help="Address of the controller; default: the one that serves the database."),
    db: Path = DB_OPTION,
    **settings: Any,
) -> None:
    """Hold an arm, or the baseline, at a range of batch sizes, in addition to what is held.

    Where two holds overlap, the later one counts. Holds survive restarts.
    `speclen tables` shows them.

    Example: speclen hold --batch 8-16 --arm "draft 2"
    """
    if sum([bool(arm), baseline, release]) != 1:
        raise UserError("give one of --arm ARM, --baseline and --release")
    request = pb.SetHoldsRequest(release=release)
    if not release:
        sizes = ranges("--batch", batch, 1, MAX_BATCH_SIZE)
        if len(sizes) != sizes[-1] - sizes[0] + 1:
            raise UserError(f"--batch {batch!r} has a gap: hold one range, such as 8-16")
        with user_errors():
            held = None if baseline else parse_arm(arm)
        values = {} if held is None else held._asdict()
        request.holds.append(pb.Hold(batch_min=sizes[0], batch_max=sizes[-1], is_baseline=baseline, **values))
    if not controller:
        if (published := serving(db)) is None:
            raise UserError(f"no controller serves {db}: start one, or give its address with --controller")
        controller = published.address
    with client_from(settings).calling("controller", controller) as channel:
        number = rpc.ControlServiceStub(channel).SetHolds(request, timeout=TIMEOUT_S).num_contexts
    what = "released" if release else f"held: {'the baseline' if baseline else arm} at batch sizes {batch}"
    print(f"{what} ({number} context{'s' * (number != 1)})")
