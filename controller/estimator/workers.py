"""Are the workers of a context alike? Each is compared with the others in the same cells; one that differs gets its own.

Nobody is believed or disbelieved: a worker whose step times differ by a small constant factor has the factor taken out,
and one whose times or acceptance differ in kind is learned from for itself alone. So what a worker reports, true or not,
decides about its own lengths, and about others' only until it is found out; till then it has no more say than they.
"""

from __future__ import annotations

import math

import numpy as np

from speclen.controller.estimator.acceptance import DISPERSION
from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.state import restored

# Reports of a worker after which what is kept of it has faded to 1/e.
MEMORY_REPORTS = 300.0
# Reports of a context between two comparisons, per worker; reports of a worker before it is compared.
ROUND_REPORTS, ENOUGH_REPORTS = 32, 24.0
# Log time by which a worker's cells may differ from the others': beyond a constant factor, root mean square; the factor.
UNLIKE_TIMES, UNLIKE_FACTOR = 0.1, 0.25
# Log ratio of accepted to expected tokens by which a worker may differ from the others, and its least significance.
UNLIKE_ACCEPTANCE, SIGNIFICANT = 0.2, 4.0
# Log time by which a step may be kept as slower than its worker's others.
MOST_SLOWER = 0.25
# Comparisons are made for so many workers of a context; in a larger fleet one worker's share is below 1%.
MOST_WORKERS = 128
# Weight of a worker's reports while it was not yet compared and sends more than the others: at least this.
LEAST_WEIGHT = 0.05
UNKNOWN = -1.0


TIMES, ACCEPTANCE = 0, 1  # places in Peer.models


class Peer:
    """What one worker reported lately.

    mean_log, as_seen, count: by cell, without the speed of the moment and with it. tokens: accepted, expected, variance;
    summed, fading.
    """

    STATE = (
        *("mean_log", "as_seen", "count", "tokens", "num_reports"),
        *("level", "offset", "models", "compared"),
    )

    def __init__(self, num_cells: int) -> None:
        self.mean_log, self.as_seen, self.count = np.zeros((3, num_cells))
        self.tokens: list[float] = [0.0, 0.0, 0.0]
        self.num_reports = 0.0
        self.level, self.offset = 0.0, 0.0  # mean log time over the shared model's; what is taken out of it
        self.models = [0, 0]  # which step times and which acceptance it shares with others
        self.compared = False

    def over(self, log_seconds: FloatArray) -> float:
        """Mean log time of its reports over a model's."""
        return float(self.count @ (self.as_seen - log_seconds)) / max(float(self.count.sum()), 1e-9)


class Workers:
    """The peers of one context, and how they compare."""

    STATE = ("peers", "since_compared")

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

    def tells_apart(self, worker: str) -> bool:
        """Whether the worker is known by itself, or will be."""
        return worker in self.peers or len(self.peers) < MOST_WORKERS

    def weight(self, peer: Peer | None) -> float:
        """What a report counts for: as much as any, but a worker not yet compared has no more say than the others."""
        if peer is None or peer.compared or len(self.peers) < 2:
            return 1.0
        others = [each.num_reports for each in self.peers.values() if each is not peer]
        fair = (sum(others) + 8.0) / max(len(others), 1)
        return min(1.0, max(LEAST_WEIGHT, fair / max(peer.num_reports, 1.0)))

    def record_times(
        self, peer: Peer, cell: np.ndarray, log_s: FloatArray, surprise: FloatArray, speed: float, count: FloatArray
    ) -> None:
        """Add log times of a worker's reports, each of so many steps.

        surprise: over the shared model's usual ones. speed: of the moment. What a step takes longer than others of its
        worker counts for little: pauses make no suspect. The model is no yardstick: another may have spoiled it.
        """
        usual = sorted(surprise.tolist())[len(surprise) // 2] if len(surprise) >= 3 else peer.level
        pause = np.maximum(surprise - usual - MOST_SLOWER, 0.0)
        log_s, surprise = log_s - pause, surprise - pause
        total = float(count.sum())
        fade = math.exp(-total / MEMORY_REPORTS)
        peer.count *= fade
        peer.num_reports = peer.num_reports * fade + total
        peer.level += (float(surprise @ count) / total - peer.level) * total / peer.num_reports
        np.add.at(peer.count, cell, count)
        share = count / peer.count[cell]
        np.add.at(peer.mean_log, cell, (log_s - speed - peer.mean_log[cell]) * share)
        np.add.at(peer.as_seen, cell, (log_s - peer.as_seen[cell]) * share)

    def record_tokens(self, peer: Peer, tokens: list[float], num_reports: float) -> None:
        """Add accepted tokens, what the model of its group expected, and the variance of that."""
        fade = math.exp(-num_reports / MEMORY_REPORTS)
        peer.tokens = [old * fade + new for old, new in zip(peer.tokens, tokens, strict=True)]

    def due(self, num_reports: int) -> bool:
        """Whether it is time to compare."""
        self.since_compared += num_reports
        if len(self.peers) < 2 or self.since_compared < ROUND_REPORTS * len(self.peers):
            return False
        self.since_compared = 0
        return True

    def unlike_in_time(self, model: int, noise: float) -> str | None:
        """The worker whose cells differ most from the others' that share a model, if one does; factors on the way."""
        members = self.sharing(TIMES, model)
        if len(members) < 2:
            for _, peer in members:
                peer.offset = 0.0
            return None
        mean, count = self._cells([peer for _, peer in members])
        total, summed = count.sum(axis=0), (count * mean).sum(axis=0)
        level = np.array([peer.level for _, peer in members])
        others = (level.sum() - level) / (len(level) - 1)
        worst, found = 1.0, None
        for at, (worker, peer) in enumerate(members):
            excess = differs(mean[at], count[at], summed - count[at] * mean[at], total - count[at], noise)
            peer.compared = peer.compared or excess != UNKNOWN
            peer.offset = float(level[at] - level.mean())
            score = max(excess / UNLIKE_TIMES**2, abs(float(level[at] - others[at])) / UNLIKE_FACTOR)
            if score > worst:
                worst, found = score, worker
        return found

    def unlike_in_acceptance(self, model: int) -> str | None:
        """The worker whose accepted tokens differ most from what the others' lead to expect, if one does."""
        members = self.sharing(ACCEPTANCE, model)
        if len(members) < 2:
            return None
        tokens = np.array([peer.tokens for _, peer in members])
        # Everybody has the same say, however much it sends.
        tokens *= np.minimum(1.0, 2.0 * tokens[:, 2].min() / np.maximum(tokens[:, 2], 1e-9))[:, None]
        others = tokens.sum(axis=0) - tokens
        ratio = (others[:, 0] + 1.0) / (others[:, 1] + 1.0)
        surprise = tokens[:, 0] - ratio * tokens[:, 1]
        z = np.abs(surprise) / np.sqrt(DISPERSION * (tokens[:, 2] + 1.0))
        size = np.abs(np.log((tokens[:, 0] + 1.0) / (ratio * tokens[:, 1] + 1.0)))
        score = np.where((size > UNLIKE_ACCEPTANCE) & (z > SIGNIFICANT), size, 0.0)
        worst = int(score.argmax())
        return members[worst][0] if score[worst] > 0.0 else None

    def sharing(self, place: int, model: int) -> list[tuple[str, Peer]]:
        """Workers with enough reports that share a model of step times or acceptance."""
        enough = ((worker, peer) for worker, peer in self.peers.items() if peer.num_reports >= ENOUGH_REPORTS)
        return [(worker, peer) for worker, peer in enough if peer.models[place] == model]

    @staticmethod
    def _cells(members: list[Peer]) -> tuple[FloatArray, FloatArray]:
        """Mean log times and reports, both [workers, cells]; none counts for more than twice another."""
        reports = np.array([peer.num_reports for peer in members])
        say = np.minimum(1.0, 2.0 * reports.min() / reports)
        return np.stack([peer.mean_log for peer in members]), np.stack([peer.count for peer in members]) * say[:, None]

    def evidence(self, model: int, most: float) -> tuple[FloatArray, FloatArray]:
        """Mean log time, factors taken out, and reports by cell of the workers that share step times."""
        members = [peer for peer in self.peers.values() if peer.models[TIMES] == model]
        count = sum((peer.count for peer in members), np.zeros(self.num_cells))
        summed = sum((peer.count * (peer.as_seen - peer.offset) for peer in members), np.zeros(self.num_cells))
        return summed / np.maximum(count, 1e-9), np.minimum(count, most)

    def renew(self) -> None:
        """Peers after a state was restored."""
        self.peers = {worker: restored(Peer(self.num_cells), state) for worker, state in self.peers.items()}


def differs(
    mean: FloatArray, count: FloatArray, others_sum: FloatArray, others_count: FloatArray, noise: float
) -> float:
    """Mean square by which a worker's log times in its cells differ from others', beyond a constant factor and noise.

    UNKNOWN where too few cells are shared to tell.
    """
    weight = count * others_count / (count + others_count + 1e-9)
    weight[weight < 0.5] = 0.0
    total, shared = float(weight.sum()), int(np.count_nonzero(weight))
    if total < ENOUGH_REPORTS / 2.0:
        return UNKNOWN
    difference = np.clip(mean - others_sum / np.maximum(others_count, 1e-9), -3.0, 3.0)
    factor = float(weight @ difference) / total
    excess = float(weight @ (difference - factor) ** 2) / total
    return max(excess - 2.0 * noise * noise * shared / total, 0.0)
