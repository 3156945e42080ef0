"""What a worker yields at every concurrency and length, measured by serving: capacity, and the best table there is.

Unlike a profile, which times steps inside the engine, a survey counts tokens that reach a client, with prompts coming
and going and gRPC in between. Its file is also a profile: `--policy profile` on it always uses the length that served
fastest, which is the oracle of a comparison.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from speclen.bench.serving.load import Prompt, Yield, closed_loop, explain
from speclen.bench.serving.tracks import MEAN_OUTPUT_TOKENS

FORMAT = "speclen-survey-1"
WARM_UP_S = 1.0
Key = tuple[int, int]  # concurrency, speculation length
# Enough for a capacity: the length that serves a full worker fastest is short, and 0 beats the rest where none pays.
CAPACITY_LENGTHS = (0, 1, 2, 3, 4)


@dataclass(slots=True)
class Survey:
    """Tokens, seconds and tokens per row and step at every (concurrency, length) that was visited."""

    tokens: dict[Key, int] = field(default_factory=dict)
    seconds: dict[Key, float] = field(default_factory=dict)
    steps_yield: dict[Key, list[float]] = field(default_factory=dict)

    def add(self, key: Key, found: Yield) -> None:
        self.tokens[key] = self.tokens.get(key, 0) + found.tokens
        self.seconds[key] = self.seconds.get(key, 0.0) + found.seconds
        self.steps_yield.setdefault(key, []).append(found.tokens_per_step)

    def tokens_per_s(self, key: Key) -> float:
        return self.tokens[key] / self.seconds[key]

    @property
    def concurrencies(self) -> list[int]:
        return sorted({concurrency for concurrency, _ in self.tokens})

    def best_length(self, concurrency: int) -> int:
        lengths = [length for c, length in self.tokens if c == concurrency]
        return max(lengths, key=lambda length: self.tokens_per_s((concurrency, length)))

    def behind(self, length: int) -> float:
        """How many times the tokens of this length the best one makes: a geometric mean over concurrencies."""
        return statistics.geometric_mean(
            self.tokens_per_s((size, self.best_length(size))) / self.tokens_per_s((size, length))
            for size in self.concurrencies
        )

    @property
    def best_single_length(self) -> int:
        """Of the lengths measured at every concurrency, the one least behind."""
        lengths = {length for _, length in self.tokens}
        everywhere = [n for n in sorted(lengths) if all((size, n) in self.tokens for size in self.concurrencies)]
        return min(everywhere, key=self.behind)

    @property
    def table_gain(self) -> float:
        """What the best length of each concurrency makes more than that single one, 0.05 for 5%: the most a table can win.

        Less, if chance had a part in which length came out best.
        """
        return self.behind(self.best_single_length) - 1.0

    def outlook(self) -> str:
        """One sentence: what a comparison with fixed lengths can be expected to show."""
        single, gain = self.best_single_length, self.table_gain
        if not gain:
            return f"by the survey, length {single} is best at every batch size: a table can win nothing over it"
        return (
            f"by the survey, the best length of every batch size makes {100 * gain:.1f}% more tokens per second than "
            f"length {single} at all of them: about the most that a table can win"
        )

    @property
    def capacity_tokens_per_s(self) -> float:
        """Tokens per second with the most rows, at the length that serves them fastest."""
        most = self.concurrencies[-1]
        return self.tokens_per_s((most, self.best_length(most)))

    @property
    def plain_s_per_token(self) -> float:
        """Seconds per token of one request alone, without speculation."""
        return 1.0 / self.tokens_per_s((1, 0))

    def is_exhaustive(self, max_length: int) -> bool:
        cells = itertools.product(self.concurrencies, range(max_length + 1))
        return bool(self.tokens) and all(cell in self.tokens for cell in cells)

    def survival(self) -> list[float]:
        """survival[i] from the growth of tokens per step with the length, averaged over concurrencies, not increasing."""
        lengths = sorted({length for _, length in self.tokens})
        expected = [self._mean_yield(length) for length in lengths]
        survival: list[float] = []
        for (short, long), (low, high) in zip(itertools.pairwise(lengths), itertools.pairwise(expected), strict=True):
            growth = (high - low) / (long - short)
            survival.extend([min(max(growth, 0.0), survival[-1] if survival else 1.0)] * (long - short))
        return survival

    def _mean_yield(self, length: int) -> float:
        found = [value for (_, s), values in self.steps_yield.items() if s == length for value in values]
        return sum(found) / len(found)

    def to_profile(self) -> dict[str, object]:
        """Cells whose step time over expected tokens is exactly the time per token that was measured."""
        survival = self.survival()
        expected = list(itertools.accumulate(survival, initial=1.0))
        cells = [
            {
                "batch_size": concurrency,
                "speculation_length": length,
                "step_s": concurrency / self.tokens_per_s((concurrency, length)) * expected[length],
            }
            for concurrency, length in sorted(self.tokens)
        ]
        return {"cells": cells, "survival": survival}

    def save(self, path: Path, facts: dict[str, object]) -> None:
        measured = [[*key, self.tokens[key], self.seconds[key], self.steps_yield[key]] for key in sorted(self.tokens)]
        content = {"format": FORMAT, **facts, **self.to_profile(), "measured": measured}
        path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def load_survey(path: Path) -> Survey:
    """Raises ValueError naming the file when it is no survey."""
    try:
        content = json.loads(path.read_text("utf-8"))
        if content["format"] != FORMAT:
            raise ValueError("another format")
        survey = Survey()
        for concurrency, length, tokens, seconds, yields in content["measured"]:
            key = (int(concurrency), int(length))
            survey.tokens[key], survey.seconds[key], survey.steps_yield[key] = tokens, seconds, yields
    except OSError as error:
        raise ValueError(f"cannot read the survey {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a survey: leave it out to measure one ({error})") from error
    if (1, 0) not in survey.tokens:
        raise ValueError(f"{path} lacks concurrency 1 without speculation: measure it again")
    return survey


def concurrencies_up_to(max_batch_size: int) -> list[int]:
    """1, 2, 4, ... and the limit itself."""
    doubling = itertools.takewhile(lambda size: size < max_batch_size, (1 << power for power in itertools.count()))
    return [*doubling, max_batch_size]


def exhaustive_cells(max_batch_size: int, max_length: int) -> list[Key]:
    return list(itertools.product(concurrencies_up_to(max_batch_size), range(max_length + 1)))


def capacity_cells(max_batch_size: int, max_length: int) -> list[Key]:
    """Only what capacity and the plain speed of one request need."""
    return [(1, 0), *((max_batch_size, length) for length in CAPACITY_LENGTHS if length <= max_length)]


async def measure(
    address: str,
    cells: Sequence[Key],
    next_prompt: Callable[[], Prompt],
    cell_s: float,
    rounds: int = 2,
    seed: int = 0,
    warm_up_s: float = WARM_UP_S,
    on_cell: Callable[[int, int], None] = lambda done, total: None,
) -> Survey:
    """Visit every cell once a round, in random order, so that what slows the machine for a while hits all alike.

    cell_s: measuring time per cell over all rounds; each visit warms up besides. Raises ValueError with a sentence when
    the worker fails.
    """
    survey, rng, done = Survey(), random.Random(seed), 0
    for _ in range(rounds):
        for concurrency, length in shuffled(cells, rng):
            try:
                found = await closed_loop(
                    address, concurrency, length, next_prompt, MEAN_OUTPUT_TOKENS, warm_up_s, cell_s / rounds
                )
            except grpc.RpcError as error:
                raise ValueError(
                    f"the survey failed at concurrency {concurrency}: {explain(error, address)}"
                ) from error
            if found.tokens == 0:
                raise ValueError(
                    f"no token came in {cell_s / rounds:g} s at concurrency {concurrency}: use a larger --cell-s"
                )
            survey.add((concurrency, length), found)
            done += 1
            on_cell(done, rounds * len(cells))
    return survey


def shuffled(cells: Iterable[Key], rng: random.Random) -> list[Key]:
    order = list(cells)
    rng.shuffle(order)
    return order
