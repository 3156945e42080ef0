"""Requests to vLLM's OpenAI API, by the official client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from openai import AsyncOpenAI

NUM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Block:
    """Result of a block of closed load. latencies_s: of the requests that ended within it."""

    tokens_per_s: float
    latencies_s: tuple[float, ...]


def closed_load(address: str, prompts: Sequence[str], concurrency: int, seconds: float) -> Block:
    """So many clients, each with one request after the other, for so long; the tokens of what ended by then count."""
    return asyncio.run(_closed_load(address, prompts, concurrency, seconds))


async def _closed_load(address: str, prompts: Sequence[str], concurrency: int, seconds: float) -> Block:
    ended: list[tuple[float, float, int]] = []
    began = time.monotonic()
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", timeout=120) as client:

        async def one(number: int) -> None:
            while time.monotonic() - began < seconds:
                start = time.monotonic()
                tokens = (await complete(client, prompts[number % len(prompts)])).tokens
                ended.append((time.monotonic() - began, time.monotonic() - start, tokens))
                number += concurrency

        await asyncio.gather(*(one(number) for number in range(concurrency)))
    took = max(at for at, _, _ in ended)
    return Block(sum(tokens for _, _, tokens in ended) / took, tuple(latency for _, latency, _ in ended))


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    tokens: int


async def complete(client: AsyncOpenAI, prompt: str) -> Completion:
    answer = await client.completions.create(
        model="target", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0.0, extra_body={"ignore_eos": True}
    )
    return Completion(answer.choices[0].text, answer.usage.completion_tokens if answer.usage else 0)


def texts(address: str, prompts: Sequence[str], concurrency: int) -> list[str]:
    """Greedy outputs, so many at once."""

    async def ask() -> list[str]:
        gate = asyncio.Semaphore(concurrency)
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", timeout=120) as client:

            async def one(prompt: str) -> str:
                async with gate:
                    return (await complete(client, prompt)).text

            return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    return asyncio.run(ask())
