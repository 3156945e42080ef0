"""`speclen top`: load, throughput and arms of workers, refreshed in place."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from speclen.cli.support.client import WORKER, Client, client_from
from speclen.cli.support.flags import flags_from
from speclen.cli.support.output import UserError, wrapped
from speclen.cli.tables import Row, table_of
from speclen.process.credentials import ClientSecurity
from speclen.records import Arm
from speclen.v1 import control_pb2
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc

Sample = tuple[float, pb.GetServerInfoResponse | str]  # time of the call, and the answer or an error sentence


@flags_from(ClientSecurity)
def top(
    worker: list[str] = typer.Option([WORKER], help="Address of a worker; can be given several times."),
    interval_s: float = typer.Option(1.0, min=0.1, help="Seconds between updates."),
    as_json: bool = typer.Option(False, "--json", help="Print the state of the workers once, as JSON."),
    **security: Any,
) -> None:
    """Watch workers: requests, throughput, acceptance and the arm in use by batch size.

    `speclen tables` shows the same arms with their figures.

    Example: speclen top --worker 127.0.0.1:7080 --worker 127.0.0.1:7081
    """
    client = client_from(security)
    with suppress(KeyboardInterrupt), ExitStack() as opened:
        channels = {address: opened.enter_context(client.channel(address)) for address in worker}
        if as_json:
            print_json(channels, client)
        else:
            watch(channels, client, interval_s)


def print_json(channels: dict[str, grpc.Channel], client: Client) -> None:
    """Print each worker's answer, or null with the reason on stderr. Raises UserError if no worker answers."""
    answers = {address: ask(address, channel, client)[1] for address, channel in channels.items()}
    reasons = [answer for answer in answers.values() if isinstance(answer, str)]
    if len(reasons) == len(channels):
        raise UserError("; ".join(reasons))
    print(json.dumps({address: as_dict(answer) for address, answer in answers.items()}, indent=2))
    for reason in reasons:
        print(wrapped(f"speclen: {reason}"), file=sys.stderr)


def watch(channels: dict[str, grpc.Channel], client: Client, interval_s: float) -> None:
    previous = {address: ask(address, channel, client) for address, channel in channels.items()}
    with Live(console=Console(markup=False), auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            current = {address: ask(address, channel, client) for address, channel in channels.items()}
            live.update(overview(previous, current), refresh=True)
            previous = current


def ask(address: str, channel: grpc.Channel, client: Client) -> Sample:
    """Ask a worker for its state; an error sentence takes the place of a missing answer."""
    answer: pb.GetServerInfoResponse | str
    try:
        answer = rpc.GenerationServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=2.0)
    except grpc.RpcError as error:
        answer = client.explain(error, "worker", address)
    return time.monotonic(), answer


def as_dict(info: pb.GetServerInfoResponse | str) -> dict[str, Any] | None:
    if isinstance(info, str):
        return None
    return MessageToDict(info, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def overview(previous: dict[str, Sample], current: dict[str, Sample]) -> RenderableType:
    """One row per worker, then errors of workers that do not answer, then the tables of the others."""
    reasons, learned = list[RenderableType](), dict[str, tuple[list[Row], list[str]]]()
    table = Table(box=None, padding=(0, 1, 0, 0))  # so that eight columns fit into 80 characters
    table.add_column("worker", no_wrap=True)
    for heading in ("running", "waiting", "KV", "tok/s", "tok/step", "accepted"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("table", no_wrap=True)
    for address, (asked_at, info) in current.items():
        if isinstance(info, str):
            table.add_row(address, *[""] * 6, "no answer")
            reasons.append(Text(info))
            continue
        before_at, before = previous[address]
        rates = rate_cells(info, before, asked_at - before_at)
        table.add_row(address, *state_cells(info), *rates, info.table_source)
        ranges = [range_of(choice) for choice in info.table.choices]
        learned.setdefault(str(ranges), (ranges, []))[1].append(address)
    parts = [table, *reasons]
    for ranges, addresses in learned.values():
        if ranges:
            parts += [Text(f"\n{', '.join(addresses)}", style="bold"), table_of(ranges, 80)]
    return Group(*parts)


def state_cells(info: pb.GetServerInfoResponse) -> list[str]:
    used = info.num_kv_tokens_used / info.num_kv_tokens_total if info.num_kv_tokens_total else 0.0
    return [str(info.num_requests_running), str(info.num_requests_waiting), f"{used:.0%}"]


def rate_cells(info: pb.GetServerInfoResponse, before: pb.GetServerInfoResponse | str, elapsed_s: float) -> list[str]:
    """Tokens per second, tokens per step of the whole batch, and share of draft tokens accepted, since `before`.

    Blank if there was no earlier answer, or it came from an earlier incarnation, whose counters are unrelated.
    """
    if isinstance(before, str) or before.worker != info.worker or elapsed_s <= 0:
        return ["", "", ""]
    tokens = info.num_generated_tokens - before.num_generated_tokens
    steps = info.num_steps - before.num_steps
    drafted = info.num_draft_tokens - before.num_draft_tokens
    accepted = info.num_accepted_tokens - before.num_accepted_tokens
    return [
        f"{tokens / elapsed_s:.0f}",
        f"{tokens / steps:.1f}" if steps else "",
        f"{accepted / drafted:.0%}" if drafted else "",
    ]


def range_of(choice: control_pb2.Choice) -> Row:
    """A row of the view choices as far as a worker knows it: the arm without figures."""
    low, high = choice.batch_min, choice.batch_max
    arm = str(Arm(choice.speculation_length, choice.ngram))
    return {"batch_bucket": str(low) if low == high else f"{low}-{high}", "arm": arm}
