"""Who still reports: workers that have gone, as every restart under a new name leaves one, keep no vote."""

from __future__ import annotations

from collections.abc import Iterable

# Turns, of all, after which a worker that had none has gone: this many, and so many for each worker that is known, since in
# a large fleet every one of them waits long for its turn.
GONE_TURNS, GONE_TURNS_EACH = 200, 4


class Heard:
    """When each worker was heard of last. last: by worker, the number of turns of all by then. clock: that number now."""

    STATE = ("last", "clock", "looked_at")

    def __init__(self) -> None:
        self.last: dict[str, int] = {}
        self.clock, self.looked_at = 0, 0

    def note(self, workers: Iterable[str]) -> list[str]:
        """These workers had their turn to report; returns those that have gone by now, and are forgotten here."""
        for worker in workers:
            self.clock += 1
            self.last[worker] = self.clock
        patience = max(GONE_TURNS, GONE_TURNS_EACH * len(self.last))
        if self.clock - self.looked_at < patience // 4:
            return []
        self.looked_at = self.clock
        gone = [worker for worker, at in self.last.items() if self.clock - at > patience]
        for worker in gone:
            del self.last[worker]
        return gone
