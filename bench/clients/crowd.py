"""Many clients at once, and many that go away: by plain sockets, since a client in Python would be slower."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass

import httpx

NUM_STREAMS = 1_000
NUM_DISCONNECTS = 10_000
NUM_AT_ONCE = 50  # of those that go away
GROWTH_BYTES = 64 * 2**20  # of memory that ten thousand clients may leave behind
SETTLE_S = 30.0  # until nothing of them is left


@dataclass(frozen=True, slots=True)
class Crowd:
    """Address (HOST:PORT) and API key of the worker."""

    address: str
    key: str

    def request(self, max_tokens: int) -> bytes:
        """A whole request for a stream."""
        body = {"prompt": "def crowd(", "stream": True, "ignore_eos": True, "temperature": 0, "max_tokens": max_tokens}
        content = json.dumps(body).encode()
        lines = ["POST /v1/completions HTTP/1.1", f"Host: {self.address}", f"Authorization: Bearer {self.key}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}", "Connection: close", "", ""]
        return "\r\n".join(lines).encode() + content

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.address.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    def metric(self, name: str) -> float:
        """Of the worker's page, summed over labels."""
        page = httpx.get(f"http://{self.address}/metrics", headers={"Authorization": f"Bearer {self.key}"})
        return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page.raise_for_status().text, re.MULTILINE)))


async def streams(crowd: Crowd, number: int = NUM_STREAMS) -> str:
    """So many streams at once: each runs to its end, or is told to come again. Raises ValueError for any other end."""
    request = crowd.request(max_tokens=16)

    async def ask() -> str:
        reader, writer = await crowd.connect()
        writer.write(request)
        answer = await reader.read(-1)
        writer.close()
        status = answer.split(b" ", 2)[1].decode()
        ended = b'"finish_reason":"length"' in answer and b"data: [DONE]" in answer
        busy = status == "429" and b"retry-after:" in answer.lower()
        return "served" if ended else "busy" if busy else f"status {status}, {len(answer)} bytes"

    answers = await asyncio.gather(*(ask() for _ in range(number)), return_exceptions=True)
    counts = Counter(answer if isinstance(answer, str) else type(answer).__name__ for answer in answers)
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    if not counts["served"] or counts.keys() - {"served", "busy"}:
        raise ValueError(told)
    return told


async def disconnects(crowd: Crowd, number: int = NUM_DISCONNECTS) -> str:
    """So many clients that go away: within their request, right after it, or after the first token.

    Raises ValueError if they leave open files or much memory behind, TimeoutError if requests.
    """
    await leave(crowd, number // 10)  # what the first ones take is kept for the next
    files, memory = crowd.metric("process_open_fds"), crowd.metric("process_resident_memory_bytes")
    await leave(crowd, number - number // 10)
    files = crowd.metric("process_open_fds") - files
    grown = crowd.metric("process_resident_memory_bytes") - memory
    told = f"{number} gone, {files:+.0f} open files, {grown / 2**20:+.1f} MiB"
    if abs(files) >= 8 or grown >= GROWTH_BYTES:
        raise ValueError(told)
    return told


async def leave(crowd: Crowd, number: int) -> None:
    """So many clients come and go, some at a time; then nothing runs or waits."""
    request, at_once = crowd.request(max_tokens=500), asyncio.Semaphore(NUM_AT_ONCE)

    async def one(kind: int) -> None:
        async with at_once:
            reader, writer = await crowd.connect()
            writer.write(request[:-20] if kind == 0 else request)
            await writer.drain()
            if kind == 2:
                await reader.read(100)
            writer.transport.abort()

    await asyncio.gather(*(one(at % 3 if at % 30 < 3 else at % 2) for at in range(number)))
    async with asyncio.timeout(SETTLE_S):
        while crowd.metric("speclen_num_requests_running") + crowd.metric("speclen_num_requests_waiting"):
            await asyncio.sleep(0.2)
