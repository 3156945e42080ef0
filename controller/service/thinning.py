"""When workers are asked to add their steps up before they report: where a core would not keep up with every single one.

What a message costs hardly depends on how many steps it tells of once they are added up. So the window is what the
number of workers and the messages that a core takes in a second make it, no longer; decisions are as much staler.
"""

from __future__ import annotations

from speclen.v1 import control_pb2 as pb

# Steps a second from which on they are added up, and below which they are not any more: a core takes twice as many in small
# messages (docs/scale.md), and one that is idle for the other half answers at once.
THIN_ABOVE, THICK_BELOW = 12_000.0, 5_000.0
# Messages a second that leave a fifth of a core idle, beside other programs too (docs/scale.md); windows in seconds.
MESSAGES_PER_S, SHORTEST_S, LONGEST_S = 1_200.0, 0.25, 10.0
# Seconds over which the rate is averaged.
MEMORY_S = 3.0


class Thinning:
    """Counts steps, and knows the window that workers are asked for: 0 while they report every step by itself."""

    def __init__(self) -> None:
        self.window_s = 0.0
        self.steps_per_s = 0.0
        self._num_steps = 0
        self._judged_at: float | None = None

    def count(self, num_steps: int) -> None:
        """So many steps were reported, however."""
        self._num_steps += num_steps

    def judge(self, now: float, num_workers: int) -> None:
        """Choose the window anew. now: seconds of a clock that never goes back. To be called about once a second."""
        before, self._judged_at = self._judged_at, now
        if before is None or now <= before:
            return
        rate, self._num_steps = self._num_steps / (now - before), 0
        self.steps_per_s += min(1.0, (now - before) / MEMORY_S) * (rate - self.steps_per_s)
        if self.steps_per_s < THICK_BELOW:
            self.window_s = 0.0
        elif self.steps_per_s > THIN_ABOVE or self.window_s:
            wanted = min(max(num_workers / MESSAGES_PER_S, SHORTEST_S), LONGEST_S)
            if not 0.8 < self.window_s / wanted < 1.25:  # what moves a little is no news for thousands of workers
                self.window_s = round(wanted, 3)

    def message(self) -> pb.Thinning | None:
        """What a worker is told when it registers."""
        return pb.Thinning(window_s=self.window_s) if self.window_s else None
