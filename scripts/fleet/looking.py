"""Looks at a fleet: its workers, its database, and waiting until something holds."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
from nodes import Up

from speclen.cli.support.database import reading
from speclen.store.queries import view_rows
from speclen.v1 import generation_pb2 as pb

SCALING_S, RECOVERY_S = 180.0, 90.0
SIZES = (1, 2, 4)  # batch sizes whose lengths are shown


def took(look: Callable[[], bool]) -> float | None:
    """Seconds until it is so; None where it does not come to that."""
    began = time.monotonic()
    while time.monotonic() - began < SCALING_S:
        if quietly(look):
            return time.monotonic() - began
        time.sleep(0.5)
    return None


def distinct(up: Up, wanted: int, looks: int = 30) -> dict[str, pb.GetServerInfoResponse]:
    """The workers that answer at the one address, by name: asked again until so many were met."""
    found: dict[str, pb.GetServerInfoResponse] = {}
    for _ in range(looks):
        with contextlib.suppress(grpc.RpcError):
            answer = up.look()
            found[answer.worker.worker_id] = answer
        if len(found) >= wanted:
            break
    return found


def quietly(recovered: Callable[[], bool]) -> bool:
    with contextlib.suppress(grpc.RpcError):
        return recovered()
    return False


def wait_for(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + RECOVERY_S
    while not (found := look()):
        if time.monotonic() > deadline:
            raise RuntimeError("the fleet did not come to the state that this stage begins with")
        time.sleep(0.2)
    return found


def count(database: Path, table: str) -> int:
    with reading(database) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def left_over(up: Up) -> bool:
    with contextlib.suppress(grpc.RpcError):
        up.look()
        return True
    return False


def lengths(database: Path) -> dict[str, dict[int, int]]:
    """Length in use by kind of worker and batch size."""
    found: dict[str, dict[int, int]] = {}
    with reading(database) as connection:
        for row in view_rows(connection, "current_choice"):
            kind = row["context"].partition("[")[2].partition(",")[0] or row["context"]
            for size in SIZES:
                if row["batch_min"] <= size <= row["batch_max"]:
                    found.setdefault(kind, {})[size] = row["speculation_length"]
    return found


def first_tables() -> list[tuple[datetime, str, float]]:
    """When each worker had its first table, its name, and the seconds since its start."""
    found = []
    for log in Path("/tmp/ray/session_latest/logs").rglob("*"):
        if log.suffix not in (".err", ".log") or not log.is_file():
            continue
        for line in log.read_text(errors="replace").splitlines():
            if "lengths are the fleet's" in line and line.startswith("{"):
                told = json.loads(line)
                at = datetime.fromisoformat(told["timestamp"])
                found.append((at, told["worker"].rpartition(":")[2], float(told["after_s"])))
    return found
