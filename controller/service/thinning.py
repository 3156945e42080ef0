"""Where a core would not keep up with every step: which workers add theirs up, for how long, and who is learned from.

What a message costs hardly depends on how many steps it tells of once they are added up. So workers add up the steps of a
window, as short as the number of workers and the messages that a core takes allow. Where that would make decisions late,
a random share of the workers goes on with short windows, and the others' are long: these are counted, and neither learned
from nor kept. What is late would teach what was, and weigh the more the longer its window; a few hundred workers are
evidence enough.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from speclen.v1 import control_pb2 as pb

# Steps a second from which on they are added up, and below which they are not any more: a core takes 1.7 times as many in
# small messages (docs/scale.md), and one that is idle for the rest answers at once.
THIN_ABOVE, THICK_BELOW = 8_000.0, 4_000.0
# Messages a second that leave a third of a core for telling workers of new tables, and for other programs (docs/scale.md).
MESSAGES_PER_S = 1_500.0
# Seconds of a window: the shortest, the longest that all workers may have, the shortest of those not learned from, the
# longest of all: the controller hears so often from everybody.
SHORTEST_S, FRESH_S, REST_S, LONGEST_S = 0.25, 0.3, 2.5, 10.0
# Of workers that are not told apart at least so many are learned from.
LEAST_SHARE = 0.02
# Seconds after which others are learned from: whoever it is might have requests of its own kind.
ROTATION_S = 60.0
# Seconds over which the rate is averaged.
MEMORY_S = 3.0


@dataclass(frozen=True, slots=True)
class Windows:
    """window_s: of workers that are learned from, 0 while they report every step by itself; rest_s: of the others.

    share: of workers that the estimator does not tell apart, how many are learned from; of those it does, all are.
    """

    window_s: float = 0.0
    rest_s: float = 0.0
    share: float = 1.0

    @classmethod
    def of_fleet(cls, num_workers: int, num_apart: int) -> Windows:
        """Those with which so many workers send no more messages than a core takes, as far as that can be had."""
        if num_workers <= MESSAGES_PER_S * FRESH_S:
            return cls(round(max(num_workers / MESSAGES_PER_S, SHORTEST_S), 3))
        others = max(num_workers - num_apart, 0)
        rest_s = min(max(2.0 * others / MESSAGES_PER_S, REST_S), LONGEST_S)
        free = MESSAGES_PER_S - num_apart / FRESH_S - others / rest_s
        share = min(max(free / (1.0 / FRESH_S - 1.0 / rest_s) / max(others, 1), LEAST_SHARE), 1.0)
        left = max(MESSAGES_PER_S - (1.0 - share) * others / rest_s, 0.25 * MESSAGES_PER_S)
        window_s = min(max((num_apart + share * others) / left, FRESH_S), LONGEST_S)
        return cls(round(window_s, 3), round(max(rest_s, window_s), 3), round(share, 3))

    def is_near(self, other: Windows) -> bool:
        """Whether a change between the two is worth no message to thousands of workers."""
        mine, its = (each.window_s / max(each.share, LEAST_SHARE) for each in (self, other))
        return (self.share < 1.0) is (other.share < 1.0) and 0.8 * its < mine < 1.25 * its

    def learns_from(self, worker_id: str, told_apart: bool, now: float) -> bool:
        """Whether this worker is one of those who are learned from. now: seconds of any clock."""
        if told_apart or self.share >= 1.0:
            return True
        turn = int(now / ROTATION_S + _drawn(worker_id))  # each at a moment of its own
        return _drawn(f"{worker_id} {turn}") < self.share


def _drawn(text: str) -> float:
    """A number from 0 to 1, always the same for a text."""
    return zlib.crc32(text.encode()) / 2**32


class Thinning:
    """Counts steps, and knows the windows that workers are asked for."""

    def __init__(self) -> None:
        self.windows = Windows()
        self.steps_per_s = 0.0
        self._num_steps = 0
        self._judged_at: float | None = None

    def count(self, num_steps: int) -> None:
        """So many steps were reported, however."""
        self._num_steps += num_steps

    def judge(self, now: float, num_workers: int, num_apart: int = 0) -> None:
        """Choose the windows anew. now: seconds of a clock that never goes back. To be called about once a second.

        num_apart: workers that the estimator tells apart.
        """
        before, self._judged_at = self._judged_at, now
        if before is None or now <= before:
            return
        rate, self._num_steps = self._num_steps / (now - before), 0
        self.steps_per_s += min(1.0, (now - before) / MEMORY_S) * (rate - self.steps_per_s)
        if self.steps_per_s < THICK_BELOW:
            self.windows = Windows()
        elif self.steps_per_s > THIN_ABOVE or self.windows.window_s:
            wanted = Windows.of_fleet(num_workers, num_apart)
            if not self.windows.window_s or not self.windows.is_near(wanted):
                self.windows = wanted

    def window_s(self, learned_from: bool) -> float:
        """What a worker is told."""
        return self.windows.window_s if learned_from else self.windows.rest_s

    def message(self, learned_from: bool) -> pb.Thinning | None:
        """The same when it registers."""
        window_s = self.window_s(learned_from)
        return pb.Thinning(window_s=window_s) if window_s else None
