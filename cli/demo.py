"""The demonstration of `speclen up --demo`: real requests at changing concurrency, and the arms that were learned."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from speclen.cli.support.client import Client
from speclen.cli.support.output import LiveLine
from speclen.cli.tables import learned_parts, table_without_lines
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc

# Beginnings of Python files, which the bundled models were trained to continue.
PROMPTS = [
    "def binary_search(items, key):\n    low, high = 0, len(items)",
    '"""Read and write configuration files."""\n\nimport os\nimport re\n\n\nclass ConfigReader:\n',
    "import unittest\n\n\nclass QueueTest(unittest.TestCase):\n\n    def test_put(self):\n",
    "class Node:\n    def __init__(self, value, next=None):\n        self.value = value\n",
    "def parse_header(line):\n    if not line:\n        raise ValueError(",
    "import sys\nimport argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "    def __repr__(self):\n        return '%s(%r)' % (self.__class__.__name__,",
    "async def handle(reader, writer):\n    data = await reader.read(100)\n",
]
SHOWN_TOKENS = 32
SHOWN_LINES = 4
CONCURRENCY = (1, 4, 16, 2, 8)
TOKENS_PER_REQUEST = 96


class Block(NamedTuple):
    """A period of one load in one mode. Tokens of its first seconds are not counted."""

    mode: str
    skipped_s: float
    counted_s: float


# Plain decoding runs between two halves with learned arms, so that a drift of the machine's speed favours neither. The
# first seconds let the controller learn at this number of requests.
BLOCKS = (Block("learned", 5.0, 3.0), Block("plain", 2.0, 6.0), Block("learned", 2.0, 3.0))
MODES = {"learned": pb.Speculation.MODE_AUTO, "plain": pb.Speculation.MODE_OFF}
SHOW_EVERY_S = 0.5
Stubs = list[rpc.GenerationServiceStub]


def run_demo(addresses: list[str], database: Path, client: Client) -> None:
    """Print generated text, the throughput of each load, and the learned table."""
    with ExitStack() as opened:
        stubs = [rpc.GenerationServiceStub(opened.enter_context(client.channel(address))) for address in addresses]
        print_text(stubs[0])
        with LiveLine() as line:
            loads = {CONCURRENCY[index]: measure_load(stubs, index, line) for index in range(len(CONCURRENCY))}
    time.sleep(2.0)  # the last reports are sent within 0.5 s, processed within 0.2 s and committed within 1 s
    console = Console(highlight=False)
    console.print(Text("Tokens per second in this run", style="bold"), throughput(loads, console.width), "", sep="\n")
    console.print(Text("Learned from decoding steps, without prefill", style="bold"))
    console.print(*learned_parts(database, context=""), sep="\n")


def print_text(stub: rpc.GenerationServiceStub) -> None:
    """Print a prompt and its continuation."""
    sampling = pb.SamplingParams(max_tokens=SHOWN_TOKENS)
    *_, last = stub.Generate(pb.GenerateRequest(text=PROMPTS[0], sampling_params=sampling), timeout=120)
    lines = [line for line in f"{PROMPTS[0]}{last.complete.text}".splitlines() if line.strip()]
    Console(highlight=False).print("", *lines[:SHOWN_LINES], "", sep="\n", markup=False, no_wrap=True)


def measure_load(stubs: Stubs, index: int, line: LiveLine) -> dict[str, float]:
    """Tokens per second of all workers, by mode, for one entry of CONCURRENCY."""
    concurrency = CONCURRENCY[index]
    text = f"load {index + 1} of {len(CONCURRENCY)}: {concurrency} request{'s' * (concurrency > 1)} at a time"
    counted = [(block, run_block(stubs, concurrency, block, partial(line.show, text))) for block in BLOCKS]
    return {mode: rate([each for each in counted if each[0].mode == mode]) for mode in MODES}


def rate(counted: list[tuple[Block, int]]) -> float:
    """Tokens per second, given blocks and the tokens counted in each."""
    return sum(tokens for _, tokens in counted) / sum(block.counted_s for block, _ in counted)


def run_block(stubs: Stubs, concurrency: int, block: Block, show: Callable[[str], None]) -> int:
    """Send requests in a closed loop and return the number of counted tokens. show: receives the mode and current rate."""
    begin = time.monotonic() + block.skipped_s
    end = begin + block.counted_s
    counted: list[int] = []  # tokens of each response; appending is atomic
    with ThreadPoolExecutor(concurrency) as pool:
        clients = [
            pool.submit(keep_sending, stubs[index % len(stubs)], index, concurrency, block.mode, (begin, end), counted)
            for index in range(concurrency)
        ]
        while (now := time.monotonic()) < end:
            so_far = f", {sum(counted) / (now - begin):.0f} tokens/s" if now > begin + SHOW_EVERY_S else ""
            show(f", {block.mode}{so_far}")
            time.sleep(min(SHOW_EVERY_S, end - now))
        for client in clients:
            client.result()
    return sum(counted)


def keep_sending(
    stub: rpc.GenerationServiceStub, first: int, stride: int, mode: str, span: tuple[float, float], counted: list[int]
) -> None:
    """Send every stride-th prompt until the span ends, and count the tokens that arrive within it."""
    begin, end = span
    for number in count(first, stride):
        request = pb.GenerateRequest(
            text=PROMPTS[number % len(PROMPTS)],
            sampling_params=pb.SamplingParams(max_tokens=TOKENS_PER_REQUEST, ignore_eos=True),
            stream=True,
            speculation=pb.Speculation(mode=MODES[mode]),
        )
        call = stub.Generate(request, timeout=120)
        for response in call:
            now = time.monotonic()
            if now >= end:
                call.cancel()
                return
            if now >= begin:
                counted.append(len(response.chunk.token_ids))


def throughput(loads: dict[int, dict[str, float]], width: int) -> Table:
    """Table of rates by mode, one row per number of concurrent requests."""
    table = table_without_lines(width)
    for heading in ("requests at a time", "plain", "learned", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for concurrency, rates in sorted(loads.items()):
        plain, learned = rates["plain"], rates["learned"]
        ratio = f"{learned / plain:.2f}x" if plain else ""
        table.add_row(str(concurrency), f"{plain:.0f}", f"{learned:.0f}", ratio)
    return table
