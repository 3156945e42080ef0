"""What a worker yields with so many requests at a time under every plan: capacity, and the best table there is.

Unlike a profile, which times steps inside the engine, a survey counts tokens that reach a client, with prompts coming
and going and gRPC in between. The plan that served fastest at every number of requests is the oracle of a comparison.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from speclen.bench.serving.load import Yield
from speclen.console.files import write_whole
from speclen.worker.drafting.plan import PLAIN, Plan, parse_plan

FORMAT = "speclen-survey-2"
Key = tuple[int, str]  # requests at a time, plan in words
# Enough for a capacity: the length that serves a full worker fastest is short, and 0 beats the rest where none pays.
CAPACITY_LENGTHS = (0, 1, 2, 3, 4)
# Beside the draft model's lengths: copying from short and long matches, few and many tokens, with and without drafts.
COPYING_PLANS = (
    "copy>=2 up to 4",
    "copy>=3 up to 8",
    "copy>=3 up to 16",
    "copy>=5 up to 8",
    "copy>=3 up to 8, else draft 1",
    "copy>=3 up to 8, else draft 3",
    "copy>=5 up to 16, else draft 5",
)


@dataclass(slots=True)
class Survey:
    """Tokens, seconds and tokens per row and step of every (requests at a time, plan) that was visited. track: whose
    requests they were.
    """

    tokens: dict[Key, int] = field(default_factory=dict)
    seconds: dict[Key, float] = field(default_factory=dict)
    steps_yield: dict[Key, list[float]] = field(default_factory=dict)
    track: str = "mixed"

    def add(self, key: Key, found: Yield) -> None:
        self.tokens[key] = self.tokens.get(key, 0) + found.tokens
        self.seconds[key] = self.seconds.get(key, 0.0) + found.seconds
        self.steps_yield.setdefault(key, []).append(found.tokens_per_step)

    def tokens_per_s(self, key: Key) -> float:
        return self.tokens[key] / self.seconds[key]

    @property
    def concurrencies(self) -> list[int]:
        return sorted({concurrency for concurrency, _ in self.tokens})

    def best_plan(self, concurrency: int, drafts_only: bool = False) -> Plan:
        """The plan that served fastest; drafts_only: of the draft model's lengths."""
        plans = [parse_plan(words) for size, words in self.tokens if size == concurrency]
        candidates = [plan for plan in plans if not (drafts_only and plan.copies)]
        return max(candidates, key=lambda plan: self.tokens_per_s((concurrency, str(plan))))

    def behind(self, plan: str, drafts_only: bool) -> float:
        """How many times the tokens of this plan the best one makes: a geometric mean over concurrencies."""
        return statistics.geometric_mean(
            self.tokens_per_s((size, str(self.best_plan(size, drafts_only)))) / self.tokens_per_s((size, plan))
            for size in self.concurrencies
        )

    @property
    def best_single(self) -> str:
        """Of the draft model's lengths that were measured everywhere, the one least behind."""
        plans = dict.fromkeys(words for _, words in self.tokens if not parse_plan(words).copies)
        everywhere = [words for words in plans if all((size, words) in self.tokens for size in self.concurrencies)]
        return min(everywhere, key=lambda words: self.behind(words, drafts_only=True))

    def gain(self, drafts_only: bool) -> float:
        """What the best of every concurrency makes more than the best single length, 0.05 for 5%.

        Less, if chance had a part in which plan came out best.
        """
        return self.behind(self.best_single, drafts_only) - 1.0

    def outlook(self) -> str:
        """One sentence: what a comparison with fixed lengths can be expected to show."""
        lengths, plans = 100 * self.gain(drafts_only=True), 100 * self.gain(drafts_only=False)
        return (
            f"by the survey, against {self.best_single!r} at every batch size, the best lengths make {lengths:.1f}% more "
            f"tokens per second and the best plans {plans:.1f}%: about the most that a table can win"
        )

    @property
    def capacity_cell(self) -> Key:
        """The most rows, and the length that serves them fastest."""
        most = self.concurrencies[-1]
        return most, str(self.best_plan(most, drafts_only=True))

    @property
    def capacity_tokens_per_s(self) -> float:
        return self.tokens_per_s(self.capacity_cell)

    @property
    def plain_s_per_token(self) -> float:
        """Seconds per token of one request alone, without speculation."""
        return 1.0 / self.tokens_per_s((1, str(PLAIN)))

    def is_exhaustive(self, max_length: int) -> bool:
        """Whether every length, and copying, was measured at every number of requests."""
        cells = itertools.product(self.concurrencies, [*lengths_up_to(max_length), *COPYING_PLANS])
        return bool(self.tokens) and all(cell in self.tokens for cell in cells)

    def save(self, path: Path, facts: dict[str, object]) -> None:
        """Raises UserError naming the file."""
        measured = [[*key, self.tokens[key], self.seconds[key], self.steps_yield[key]] for key in sorted(self.tokens)]
        lines = ",\n  ".join(json.dumps(row) for row in measured)
        head = json.dumps({"format": FORMAT, "track": self.track, **facts}, indent=1)[:-2]
        write_whole(path, f'{head},\n "measured": [\n  {lines}\n ]\n}}')


def load_survey(path: Path) -> Survey:
    """Raises ValueError naming the file when it is no survey."""
    try:
        content = json.loads(path.read_text("utf-8"))
        if content["format"] != FORMAT:
            raise ValueError("another format")
        survey = Survey(track=content["track"])
        for concurrency, words, tokens, seconds, yields in content["measured"]:
            key = (int(concurrency), str(parse_plan(words)))
            survey.tokens[key], survey.seconds[key], survey.steps_yield[key] = tokens, seconds, yields
    except OSError as error:
        raise ValueError(f"cannot read the survey {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a survey: leave it out to measure one ({error})") from error
    if (1, str(PLAIN)) not in survey.tokens:
        raise ValueError(f"{path} lacks one request at a time without speculation: measure it again")
    return survey


def lengths_up_to(max_length: int) -> list[str]:
    """The plans of the draft model's lengths."""
    return [str(Plan(length)) for length in range(max_length + 1)]


def concurrencies_up_to(max_batch_size: int) -> list[int]:
    """1, 2, 4, ... and the limit itself."""
    doubling = itertools.takewhile(lambda size: size < max_batch_size, (1 << power for power in itertools.count()))
    return [*doubling, max_batch_size]


def exhaustive_cells(max_batch_size: int, max_length: int) -> list[Key]:
    return list(itertools.product(concurrencies_up_to(max_batch_size), [*lengths_up_to(max_length), *COPYING_PLANS]))


def capacity_cells(max_batch_size: int, max_length: int) -> list[Key]:
    """Only what capacity and the plain speed of one request need."""
    lengths = [str(Plan(length)) for length in CAPACITY_LENGTHS if length <= max_length]
    return list(dict.fromkeys([(1, str(PLAIN)), *((max_batch_size, words) for words in lengths)]))


def measure(
    cells: Sequence[Key],
    visit: Callable[[int, int, Plan], Yield],
    rounds: int = 2,
    seed: int = 0,
    on_cell: Callable[[int, int], None] = lambda done, total: None,
) -> Survey:
    """Visit every cell once a round, in random order, so that what slows the machine for a while hits all alike.

    visit: serves the requests of a round, so many at a time, by a plan: the same for every plan, since of unlike requests a
    few seconds differ by a tenth. Raises ValueError when a cell yields no token.
    """
    survey, rng, done = Survey(), random.Random(seed), 0
    for number in range(rounds):
        for concurrency, words in shuffled(cells, rng):
            found = visit(number, concurrency, parse_plan(words))
            if found.tokens == 0:
                raise ValueError(
                    f"no token came in {found.seconds:g} s with {concurrency} requests at a time: use a larger --cell-s"
                )
            survey.add((concurrency, words), found)
            done += 1
            on_cell(done, rounds * len(cells))
    return survey


def shuffled(cells: Iterable[Key], rng: random.Random) -> list[Key]:
    order = list(cells)
    rng.shuffle(order)
    return order
