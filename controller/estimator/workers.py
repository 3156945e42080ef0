"""Are the workers of a context alike? Each is compared with the others in the same cells; one that differs gets its own.

Nobody is believed or disbelieved: a worker whose step times differ by a constant factor has the factor taken out, and
one whose times or acceptance differ in kind is learned from for itself alone. So what a worker reports, true or not, decides about
its own lengths, and about others' only for the reports until it is found out, which count no more than another worker's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from controller.arrays import FloatArray

# Reports of a worker after which what is kept of it has faded to 1/e.
MEMORY_REPORTS = 300.0
# Reports of a context between two comparisons, per worker; reports of a worker before it is compared.
ROUND_REPORTS, ENOUGH_REPORTS = 32, 24.0
# Log time by which a worker's cells may differ from the others' beyond a constant factor, root mean square.
UNLIKE_TIMES = 0.08
# Log ratio of accepted to expected tokens by which a worker may differ from the others, and its least significance.
UNLIKE_ACCEPTANCE, SIGNIFICANT = 0.2, 4.0
# Comparisons are made for so many workers of a context; in a larger fleet one worker's share is below 1%.
MOST_WORKERS = 128
# Weight of a worker's reports while it was not yet compared and sends more than the others: at least this.
LEAST_WEIGHT = 0.05


class Peer:
    """What one worker reported lately. mean_log, count: by cell. tokens: accepted, expected, variance; summed, fading."""

    def __init__(self, num_cells: int) -> None:
        self.mean_log, self.count = np.zeros((2, num_cells))
        self.tokens = [0.0, 0.0, 0.0]
        self.num_reports = 0.0
        self.offset = 0.0
        self.group = 0
        self.compared = False


class Workers:
    """The peers of one context, and how they compare."""

    def __init__(self, num_cells: int) -> None:
        self.num_cells = num_cells
        self.peers: dict[str, Peer] = {}
        self.since_compared = 0

    def peer(self, worker: str) -> Peer | None:
        """What is known of a worker; None where there are too many."""
        peer = self.peers.get(worker)
        if peer is None and len(self.peers) < MOST_WORKERS:
            peer = self.peers[worker] = Peer(self.num_cells)
        return peer

    def weight(self, peer: Peer | None) -> float:
        """What a report counts for: as much as any, but a worker not yet compared has no more say than the others."""
        if peer is None or peer.compared or len(self.peers) < 2:
            return 1.0
        others = [each.num_reports for each in self.peers.values() if each is not peer and each.group == peer.group]
        fair = (sum(others) + 8.0) / max(len(others), 1)
        return min(1.0, max(LEAST_WEIGHT, fair / max(peer.num_reports, 1.0)))

    def record_times(self, peer: Peer, cell: np.ndarray, log_s: FloatArray) -> None:
        """Add log times of a worker's steps, without the speed of the moment."""
        fade = math.exp(-len(cell) / MEMORY_REPORTS)
        peer.count *= fade
        peer.num_reports = peer.num_reports * fade + len(cell)
        np.add.at(peer.count, cell, 1.0)
        np.add.at(peer.mean_log, cell, (log_s - peer.mean_log[cell]) / peer.count[cell])

    def record_tokens(self, peer: Peer, accepted: float, expected: float, variance: float, num_reports: int) -> None:
        """Add accepted tokens beside what the model of its group expected."""
        fade = math.exp(-num_reports / MEMORY_REPORTS)
        peer.tokens = [
            old * fade + new for old, new in zip(peer.tokens, (accepted, expected, variance), strict=True)
        ]

    def due(self, num_reports: int) -> bool:
        """Whether it is time to compare."""
        self.since_compared += num_reports
        if len(self.peers) < 2 or self.since_compared < ROUND_REPORTS * len(self.peers):
            return False
        self.since_compared = 0
        return True

    def unlike_in_time(self, group: int, noise: float) -> str | None:
        """The worker of a group whose cells differ most from the others' beyond a factor, if one does; offsets on the way."""
        members = self._members(group)
        if len(members) < 2:
            return None
        mean = np.stack([peer.mean_log for _, peer in members])
        count = np.stack([peer.count for _, peer in members])
        worst, found = UNLIKE_TIMES**2, None
        total, summed = count.sum(axis=0), (count * mean).sum(axis=0)
        for (worker, peer), mine, n in zip(members, mean, count, strict=True):
            offset, excess = differs(mine, n, summed - n * mine, total - n, noise)
            peer.offset += 0.5 * (offset - peer.offset)
            peer.compared = True
            if excess > worst:
                worst, found = excess, worker
        # Factors are relative to the group: their mean is 1.
        middle = float(np.mean([peer.offset for _, peer in members]))
        for _, peer in members:
            peer.offset -= middle
        return found

    def unlike_in_acceptance(self, group: int, dispersion: float) -> str | None:
        """The worker of a group whose accepted tokens differ most from what the others' would lead to expect, if one does."""
        members = self._members(group)
        if len(members) < 2:
            return None
        tokens = np.array([peer.tokens for _, peer in members])
        others = tokens.sum(axis=0) - tokens
        ratio = (others[:, 0] + 1.0) / (others[:, 1] + 1.0)
        surprise = tokens[:, 0] - ratio * tokens[:, 1]
        z = np.abs(surprise) / np.sqrt(dispersion * (tokens[:, 2] + 1.0))
        size = np.abs(np.log((tokens[:, 0] + 1.0) / (ratio * tokens[:, 1] + 1.0)))
        score = np.where((size > UNLIKE_ACCEPTANCE) & (z > SIGNIFICANT), z, 0.0)
        worst = int(score.argmax())
        return members[worst][0] if score[worst] > 0.0 else None

    def fits(self, worker: str, group: int, noise: float) -> bool:
        """Whether a worker's cells agree with those of another group's workers."""
        mine, members = self.peers[worker], self._members(group)
        if not members:
            return False
        count = np.stack([peer.count for _, peer in members])
        summed = (count * np.stack([peer.mean_log for _, peer in members])).sum(axis=0)
        _, excess = differs(mine.mean_log, mine.count, summed, count.sum(axis=0), noise)
        return -1.0 < excess < UNLIKE_TIMES**2

    def _members(self, group: int) -> list[tuple[str, Peer]]:
        return [
            (worker, peer)
            for worker, peer in self.peers.items()
            if peer.group == group and peer.num_reports >= ENOUGH_REPORTS
        ]

    def evidence(self, group: int, most: float) -> tuple[FloatArray, FloatArray]:
        """Mean log time, offsets taken out, and reports by cell of a group's workers."""
        members = [peer for peer in self.peers.values() if peer.group == group]
        count = sum((peer.count for peer in members), np.zeros(self.num_cells))
        summed = sum((peer.count * (peer.mean_log - peer.offset) for peer in members), np.zeros(self.num_cells))
        return summed / np.maximum(count, 1e-9), np.minimum(count, most)

    def extend(self, place: np.ndarray, num_cells: int) -> None:
        """Room for more cells: place[i] is where cell i goes."""
        self.num_cells = num_cells
        for peer in self.peers.values():
            for name in ("mean_log", "count"):
                values = np.zeros(num_cells)
                values[place] = getattr(peer, name)
                setattr(peer, name, values)

    def export_state(self) -> dict[str, Any]:
        """JSON-able values from which to go on."""
        return {
            worker: [p.mean_log.tolist(), p.count.tolist(), p.tokens, p.num_reports, p.offset, p.group, p.compared]
            for worker, p in self.peers.items()
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from an exported state."""
        for worker, (mean_log, count, tokens, num_reports, offset, group, compared) in state.items():
            peer = self.peers[worker] = Peer(self.num_cells)
            peer.mean_log, peer.count = np.array(mean_log, dtype=float), np.array(count, dtype=float)
            peer.tokens = [float(value) for value in tokens]
            peer.num_reports, peer.offset = float(num_reports), float(offset)
            peer.group, peer.compared = int(group), bool(compared)


def differs(
    mean: FloatArray, count: FloatArray, others_sum: FloatArray, others_count: FloatArray, noise: float
) -> tuple[float, float]:
    """Log factor of a worker over others in the same cells, and mean square by which cells differ beyond it and noise.

    The latter is -1 where too few cells are shared to tell.
    """
    weight = count * others_count / (count + others_count + 1e-9)
    weight[weight < 0.5] = 0.0
    total, shared = float(weight.sum()), int(np.count_nonzero(weight))
    if total < ENOUGH_REPORTS / 2.0:
        return 0.0, -1.0
    difference = np.clip(mean - others_sum / np.maximum(others_count, 1e-9), -3.0, 3.0)
    offset = float(weight @ difference) / total
    excess = float(weight @ (difference - offset) ** 2) / total
    return offset, excess - 2.0 * noise * noise * shared / total
