"""Tokens that a worker yields with so many requests at a time at every length: capacity, and the best table there is.

Unlike a profile, which times steps inside the engine, a survey counts tokens that reach a client, with prompts coming
and going and gRPC in between. The length that served fastest at every number of requests is the oracle of a comparison.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

from speclen.bench.serving.load import Yield
from speclen.console.files import write_whole
from speclen.records import PLAIN, Arm, parse_arm

FORMAT = "speclen-survey-4"
Key = tuple[int, str]  # requests at a time, arm in words
FIRST_VISITS = LATER_VISITS = 2
NEAR = 1.08  # the best is so many times a finalist at most: two visits of some seconds tell no more
# Enough for a capacity: the length that serves a full worker fastest is short, and 0 beats the rest where none pays.
CAPACITY_LENGTHS = (0, 1, 2, 3, 4)


@dataclass(slots=True)
class Survey:
    """Yields of every visit of a (requests at a time, arm), in order. track: whose requests they were.

    The first FIRST_VISITS of every cell were made whatever came of them; later ones only where it was among the best.
    """

    visits: dict[Key, list[Yield]] = field(default_factory=dict)
    track: str = "mixed"

    def add(self, key: Key, found: Yield) -> None:
        self.visits.setdefault(key, []).append(found)

    def tokens_per_s(self, key: Key) -> float:
        return rate_of(self.visits[key])

    @property
    def concurrencies(self) -> list[int]:
        return sorted({concurrency for concurrency, _ in self.visits})

    def arms_at(self, concurrency: int) -> list[str]:
        """Arms that were measured with so many requests at a time."""
        return [words for size, words in self.visits if size == concurrency]

    def best_arm(self, concurrency: int) -> Arm:
        """The arm that served fastest, by all visits."""
        return parse_arm(max(self.arms_at(concurrency), key=lambda words: self.tokens_per_s((concurrency, words))))

    @property
    def best_single(self) -> str:
        """The length with the most tokens of those that were measured everywhere."""
        arms = dict.fromkeys(words for _, words in self.visits)
        everywhere = [words for words in arms if all((size, words) in self.visits for size in self.concurrencies)]
        return max(everywhere, key=self._rate_everywhere)

    def _rate_everywhere(self, words: str) -> float:
        return statistics.geometric_mean(rate_of(self._first((size, words))) for size in self.concurrencies)

    def _first(self, key: Key) -> list[Yield]:
        return self.visits[key][:FIRST_VISITS]

    def _later(self, key: Key) -> list[Yield]:
        return self.visits[key][FIRST_VISITS:] or self.visits[key]

    def gain(self) -> float:
        """Share that the best of every concurrency makes more than the best single length, 0.05 for 5%.

        Both are chosen by the first visits and valued by the later ones: what is best of many by chance is not best again.
        """
        single = self.best_single
        ratios = []
        for size in self.concurrencies:
            chosen = max(self.arms_at(size), key=lambda words: rate_of(self._first((size, words))))
            ratios.append(rate_of(self._later((size, chosen))) / rate_of(self._later((size, single))))
        return statistics.geometric_mean(ratios) - 1.0

    def finalists(self) -> list[Key]:
        """Cells of later visits: those near the best, and the best single length."""
        found = []
        for size, words in self.visits:
            best = str(self.best_arm(size))
            is_near = NEAR * self.tokens_per_s((size, words)) >= self.tokens_per_s((size, best))
            if is_near or words == self.best_single:
                found.append((size, words))
        return found

    def outlook(self) -> str:
        """One sentence: the gain over fixed lengths that a comparison can be expected to show."""
        return (
            f"by the survey, against {self.best_single!r} at every batch size, the best lengths make "
            f"{100 * self.gain():+.1f}% tokens per second, chosen by some visits and valued by others: about what a table "
            "can win"
        )

    @property
    def capacity_cell(self) -> Key:
        """The most rows, and the length that serves them fastest."""
        most = self.concurrencies[-1]
        return most, str(self.best_arm(most))

    @property
    def capacity_tokens_per_s(self) -> float:
        return self.tokens_per_s(self.capacity_cell)

    def is_exhaustive(self, max_length: int) -> bool:
        """True if every length was measured at every number of requests."""
        cells = itertools.product(self.concurrencies, lengths_up_to(max_length))
        return bool(self.visits) and all(cell in self.visits for cell in cells)

    def save(self, path: Path, facts: dict[str, object]) -> None:
        """Raises UserError naming the file."""
        measured = [[*key, [astuple(one) for one in self.visits[key]]] for key in sorted(self.visits)]
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
        for concurrency, words, visits in content["measured"]:
            survey.visits[int(concurrency), str(parse_arm(words))] = [Yield(*visit) for visit in visits]
    except OSError as error:
        raise ValueError(f"cannot read the survey {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a survey: leave it out to measure one ({error})") from error
    if (1, str(PLAIN)) not in survey.visits:
        raise ValueError(f"{path} lacks one request at a time without speculation: measure it again")
    return survey


def lengths_up_to(max_length: int) -> list[str]:
    """The lengths, in words."""
    return [str(Arm(length)) for length in range(max_length + 1)]


def concurrencies_up_to(max_batch_size: int) -> list[int]:
    """1, 2, 4, ... and the limit itself."""
    doubling = itertools.takewhile(lambda size: size < max_batch_size, (1 << power for power in itertools.count()))
    return [*doubling, max_batch_size]


def exhaustive_cells(max_batch_size: int, max_length: int) -> list[Key]:
    return list(itertools.product(concurrencies_up_to(max_batch_size), lengths_up_to(max_length)))


def capacity_cells(max_batch_size: int, max_length: int) -> list[Key]:
    """Only what capacity and the plain speed of one request need."""
    lengths = [str(Arm(length)) for length in CAPACITY_LENGTHS if length <= max_length]
    return list(dict.fromkeys([(1, str(PLAIN)), *((max_batch_size, words) for words in lengths)]))


def measure(
    cells: Sequence[Key],
    visit: Callable[[int, int, Arm], Yield],
    seed: int = 0,
    on_cell: Callable[[int, int], None] = lambda done, total: None,
) -> Survey:
    """Visit every cell once a round, in random order, so that what slows the machine for a while hits all alike; then those
    that are near the best, so that which is best hangs less on chance.

    visit: serves the requests of a round, so many at a time, by an arm: the same for every arm, since of unlike requests a
    few seconds differ by a tenth. Raises ValueError when a cell yields no token.
    """
    survey, rng, done = Survey(), random.Random(seed), 0
    for number in range(FIRST_VISITS + LATER_VISITS):
        if number == FIRST_VISITS:
            cells, done = survey.finalists(), 0
        of_stage = (FIRST_VISITS if number < FIRST_VISITS else LATER_VISITS) * len(cells)
        for concurrency, words in shuffled(cells, rng):
            found = visit(number, concurrency, parse_arm(words))
            if found.tokens == 0:
                raise ValueError(
                    f"no token came in {found.seconds:g} s with {concurrency} requests at a time: use a larger --cell-s"
                )
            survey.add((concurrency, words), found)
            done += 1
            on_cell(done, of_stage)
    return survey


def rate_of(visits: Sequence[Yield]) -> float:
    """Tokens per second of all of them together."""
    return sum(one.tokens for one in visits) / sum(one.seconds for one in visits)


def shuffled(cells: Iterable[Key], rng: random.Random) -> list[Key]:
    order = list(cells)
    rng.shuffle(order)
    return order
