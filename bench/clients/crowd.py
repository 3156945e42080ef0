"""Many clients at once, and many that go away: by plain sockets, since a client in Python would be slower."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from dataclasses import dataclass

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

    def request(self, **fields: object) -> bytes:
        """A whole request for a stream."""
        body = {"prompt": "def crowd(", "stream": True, "ignore_eos": True, "temperature": 0} | fields
        content = json.dumps(body).encode()
        lines = ["POST /v1/completions HTTP/1.1", f"Host: {self.address}", f"Authorization: Bearer {self.key}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}", "Connection: close", "", ""]
        return "\r\n".join(lines).encode() + content

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.address.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    def metric(self, name: str) -> float:
        """Of the worker's page, summed over labels."""
        headers = {"Authorization": f"Bearer {self.key}"}
        with urllib.request.urlopen(urllib.request.Request(f"http://{self.address}/metrics", headers=headers)) as page:
            found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page.read().decode(), re.MULTILINE)
        return sum(map(float, found))


async def streams(crowd: Crowd, number: int = NUM_STREAMS) -> tuple[bool, str]:
    """So many streams at once: each runs to its end, or is told to come again. Whether, and what there was."""
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

    started = time.monotonic()
    answers = await asyncio.gather(*(ask() for _ in range(number)), return_exceptions=True)
    found = [answer if isinstance(answer, str) else type(answer).__name__ for answer in answers]
    counts = {kind: found.count(kind) for kind in sorted(set(found))}
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    passed = set(counts) <= {"served", "busy"} and counts.get("served", 0) > 0
    return passed, f"{told} in {time.monotonic() - started:.1f} s"


async def disconnects(crowd: Crowd, number: int = NUM_DISCONNECTS) -> tuple[bool, str]:
    """So many clients that go away: within their request, right after it, or after the first token."""
    request = crowd.request(max_tokens=500)
    at_once = asyncio.Semaphore(NUM_AT_ONCE)

    async def leave(kind: int) -> None:
        async with at_once:
            reader, writer = await crowd.connect()
            writer.write(request[:-20] if kind == 0 else request)
            await writer.drain()
            if kind == 2:
                await reader.read(100)
            writer.transport.abort()

    async def leave_all(total: int) -> None:
        await asyncio.gather(*(leave(at % 3 if at % 30 < 3 else at % 2) for at in range(total)))
        await settled(crowd)

    await leave_all(number // 10)  # what the first ones take is kept for the next
    files, memory = crowd.metric("process_open_fds"), crowd.metric("process_resident_memory_bytes")
    await leave_all(number - number // 10)
    files = crowd.metric("process_open_fds") - files
    grown = crowd.metric("process_resident_memory_bytes") - memory
    passed = abs(files) < 8 and grown < GROWTH_BYTES
    return passed, f"{number} gone, {files:+.0f} open files, {grown / 2**20:+.1f} MiB"


async def settled(crowd: Crowd) -> None:
    """Wait until nothing runs or waits. Raises TimeoutError."""
    async with asyncio.timeout(SETTLE_S):
        while crowd.metric("speclen_num_requests_running") + crowd.metric("speclen_num_requests_waiting"):
            await asyncio.sleep(0.2)
