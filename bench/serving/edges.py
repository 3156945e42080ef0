"""What HTTP costs against gRPC: the same worker, the same prompts, one edge after the other.

    python -m speclen.bench.serving.edges --rounds 30 --concurrency 16

Closed loops: as soon as one streamed request ends, the next begins. Rounds are short and alternate which edge is first.
Beside tokens a second stand the CPU seconds that the worker spent per thousand tokens, in which the client has no part.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from grpc import aio

from speclen.bench.serving.deployment import free_address
from speclen.bench.spread import spread
from speclen.console.processes import Child
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc

PROMPTS = [f"def function_{number}(a, b):\n    " for number in range(64)]

# Sends one prompt and reads the stream to its end; the value: tokens, and seconds to the first of them.
Ask = Callable[[str, int], Awaitable[tuple[int, float]]]


@dataclass(slots=True)
class Rounds:
    """Figures of one edge: an entry a round, and for first_token_s a request."""

    tokens_per_s: list[float] = field(default_factory=list)
    worker_cpu_s_per_1000_tokens: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)


def ask_over_grpc(stub: rpc.GenerationServiceAsyncStub) -> Ask:
    async def ask(prompt: str, max_tokens: int) -> tuple[int, float]:
        sampling = pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        started, first, num_tokens = time.perf_counter(), 0.0, 0
        async for response in stub.Generate(pb.GenerateRequest(text=prompt, sampling_params=sampling, stream=True)):
            first = first or time.perf_counter() - started
            num_tokens += len(response.chunk.token_ids)
        return num_tokens, first

    return ask


def ask_over_http(address: str) -> Ask:
    """Plain sockets: a client in Python would cost more than what is measured."""
    host, _, port = address.rpartition(":")
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(prompt: str, max_tokens: int) -> tuple[int, float]:
        reader, writer = idle.pop() if idle else await asyncio.open_connection(host, int(port))
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        content = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
        started, first = time.perf_counter(), 0.0
        lines = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        writer.write(f"{lines}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.splitlines()[0]:
            raise RuntimeError(f"HTTP answered {head!r}")
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            tail = tail[-8192:] + await reader.read(65_536)
            first = first or time.perf_counter() - started
        idle.append((reader, writer))
        usage = json.loads(tail[tail.rindex(b'"usage":{') + 8 :].partition(b"}")[0] + b"}")
        return int(usage["completion_tokens"]), first

    return ask


async def load(ask: Ask, concurrency: int, duration_s: float, max_tokens: int) -> float:
    """Tokens a second of a closed loop; what is under way at the end is waited for and counted."""
    started = time.perf_counter()

    async def client(number: int) -> int:
        total = 0
        while time.perf_counter() - started < duration_s:
            total += (await ask(PROMPTS[number % len(PROMPTS)], max_tokens))[0]
        return total

    return sum(await asyncio.gather(*map(client, range(concurrency)))) / (time.perf_counter() - started)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(arguments: argparse.Namespace, addresses: dict[str, str], pid: int) -> dict[str, Rounds]:
    found = {name: Rounds() for name in addresses}
    async with aio.insecure_channel(addresses["gRPC"]) as channel:
        edges = {
            "gRPC": ask_over_grpc(rpc.GenerationServiceStub(channel)),
            "HTTP": ask_over_http(addresses["HTTP"]),
        }
        for ask in edges.values():
            await load(ask, arguments.concurrency, 3.0, arguments.max_tokens)
        for number in range(arguments.rounds):
            for name in sorted(edges, reverse=number % 2 == 1):
                await one_round(edges[name], found[name], arguments, pid)
        for number in range(arguments.first_tokens):  # one request at a time, the edges in turn
            for name in sorted(edges, reverse=number % 2 == 1):
                found[name].first_token_s.append((await edges[name](PROMPTS[number % len(PROMPTS)], 1))[1])
    return found


async def one_round(ask: Ask, found: Rounds, arguments: argparse.Namespace, pid: int) -> None:
    cpu_before, started = cpu_seconds(pid), time.perf_counter()
    rate = await load(ask, arguments.concurrency, arguments.duration_s, arguments.max_tokens)
    num_tokens = rate * (time.perf_counter() - started)
    found.tokens_per_s.append(rate)
    found.worker_cpu_s_per_1000_tokens.append((cpu_seconds(pid) - cpu_before) / num_tokens * 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--duration-s", type=float, default=1.0)
    parser.add_argument("--first-tokens", type=int, default=200, help="Requests whose first token is timed, an edge.")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--policy", default="fixed:2")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of the worker.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        addresses = {"gRPC": free_address(), "HTTP": free_address()}
        options = ["--policy", arguments.policy, "--threads", str(arguments.threads), "--controller", ""]
        options += ["--listen", addresses["gRPC"], "--http-listen", addresses["HTTP"]]
        worker = Child("worker", ["worker", *options], addresses["gRPC"], Path(folder) / "worker.log")
        worker.start()
        try:
            worker.wait_until_serving(120, functools.partial(print, file=sys.stderr))
            assert worker.process is not None
            found = asyncio.run(measure(arguments, addresses, worker.process.pid))
        finally:
            worker.stop(timeout_s=20)
    report(found, arguments)


def report(found: dict[str, Rounds], arguments: argparse.Namespace) -> None:
    """One JSON object: both edges, and HTTP over gRPC round by round."""
    http, grpc = found["HTTP"], found["gRPC"]
    result = {
        "settings": vars(arguments),
        **{name: {key: asdict(spread(values)) for key, values in asdict(one).items()} for name, one in found.items()},
        "throughput_http_over_grpc": quartiles([a / b for a, b in pairs(http.tokens_per_s, grpc.tokens_per_s)]),
        "worker_cpu_http_over_grpc": quartiles(
            [a / b for a, b in pairs(http.worker_cpu_s_per_1000_tokens, grpc.worker_cpu_s_per_1000_tokens)]
        ),
        "first_token_http_minus_grpc_ms": quartiles(
            [1000 * (a - b) for a, b in pairs(http.first_token_s, grpc.first_token_s)]
        ),
    }
    print(json.dumps(result, indent=2))


def pairs(one: list[float], other: list[float]) -> list[tuple[float, float]]:
    return list(zip(one, other, strict=True))


def quartiles(values: list[float]) -> dict[str, float]:
    """With the 95% interval of the median, by ranks: whatever the values are distributed like."""
    low, median, high = statistics.quantiles(values, n=4)
    found = {"median": median, "lower_quartile": low, "upper_quartile": high, "repeats": len(values)}
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    least, most = max(0, round(len(values) / 2 - half) - 1), min(len(values) - 1, round(len(values) / 2 + half))
    return found | {"median_at_least": ordered[least], "median_at_most": ordered[most]}


if __name__ == "__main__":
    main()
