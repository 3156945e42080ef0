"""Are the workers of a context alike? Each is compared with the others in the same cells; one that differs gets its own.

Nobody is believed or disbelieved: a worker whose step times differ by a small constant factor has the factor taken out,
and one whose times or acceptance differ in kind is learned from for itself alone. So what a worker reports, true or not,
decides about its own lengths, and about others' only until it is found out; till then it has no more say than they.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from speclen.controller.estimator.acceptance import DISPERSION, NUM_CLASSES, Judged, Parts
from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.heard import Heard
from speclen.controller.estimator.state import restored
from speclen.controller.estimator.times.steps import ByStep, Spans, by_step, summed

# Reports of a worker after which what is kept of it has faded to 1/e.
MEMORY_REPORTS = 300.0
# Outputs that it reviewed, likewise; before those are compared.
MEMORY_REVIEWS, ENOUGH_REVIEWS = 100.0, 5
# Every output counts as one of so many tokens; sd of the share that would have been proposed.
USUAL_TOKENS, RIGHT_SD = 64.0, 0.12
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
# Workers that were set apart and have gone, of whom that is remembered, should they come back.
MOST_APART = 16
# Weight of a worker's reports while it was not yet compared and sends more than the others: at least this.
LEAST_WEIGHT = 0.05
UNKNOWN = -1.0


TIMES, ACCEPTANCE = 0, 1  # places in Peer.models


class Peer:
    """What one worker reported lately.

    mean_log, as_seen, count: by cell, without the speed of the moment and with it. tokens: accepted, expected, variance; by
    class and load, summed, fading, [classes x bands, 3]. reviewed: the same of outputs that it reviewed, by class.
    """

    STATE = (
        *("mean_log", "as_seen", "count", "tokens", "reviewed", "num_reviews", "num_reports", "num_told"),
        *("level", "offset", "models", "compared"),
    )

    def __init__(self, cells: FloatArray, num_loads: int) -> None:
        """cells: its place among all peers', [3, cells]. num_loads: classes x bands."""
        self.mean_log, self.as_seen, self.count = cells
        self.tokens, self.reviewed = np.zeros((num_loads, 3)), np.zeros((NUM_CLASSES, 3))
        self.num_reports, self.num_reviews = 0.0, 0
        self.num_told = 0.0  # reports of any kind; num_reports: those that say something about time
        self.level, self.offset = 0.0, 0.0  # mean log time over the shared model's; what is taken out of it
        self.models = [0, 0]  # which step times and which acceptance it shares with others
        self.compared = False

    def over(self, log_seconds: FloatArray) -> float:
        """Mean log time of its reports over a model's."""
        over = float(self.count @ (self.as_seen - log_seconds)) / max(float(self.count.sum()), 1e-9)
        return over if math.isfinite(over) else 0.0


class Workers:
    """The peers of one context, and how they compare.

    cells: mean_log, as_seen and count of all peers, [3, peers, cells], with room for more. place: of each peer in it.
    heard: who reports; of those that have gone nothing is kept but, in apart, which models the last few had for themselves.
    elsewhere: peers of the pair's other contexts that still report and share its acceptance, by which others are judged.
    """

    STATE = ("peers", "since_compared", "heard", "apart")

    def __init__(self, num_cells: int, num_bands: int) -> None:
        self.num_bands, self.num_loads = num_bands, NUM_CLASSES * num_bands
        self.peers: dict[str, Peer] = {}
        self.since_compared = 0
        self.heard = Heard()
        self.apart: dict[str, list[int]] = {}
        self.cells = np.zeros((3, 2, num_cells))
        self.place: dict[str, int] = {}
        self.elsewhere: Callable[[], list[Peer]] = list

    def go_on_from(self, old: Workers) -> None:
        """Keep who is there, and who was set apart, of a context with smaller limits; nobody was compared in this one."""
        self.heard, self.apart = old.heard, old.apart
        for worker, known in old.peers.items():
            if (peer := self.peer(worker)) is not None:
                peer.models = known.models

    def peer(self, worker: str) -> Peer | None:
        """What is known of a worker; None where there are too many."""
        peer = self.peers.get(worker)
        if peer is None and len(self.peers) < MOST_WORKERS:
            place = self.place[worker] = len(self.peers)
            if place == self.cells.shape[1]:
                self._move(np.concatenate([self.cells, np.zeros_like(self.cells)], axis=1))
            peer = self.peers[worker] = Peer(self.cells[:, place], self.num_loads)
            peer.models = self.apart.pop(worker, peer.models)
        return peer

    def note(self, spans: Spans) -> None:
        """Workers have sent reports; those that have not for long have gone, and nobody is compared with them."""
        if gone := self.heard.note(worker for worker, _ in spans):
            for worker in gone:
                peer = self.peers.pop(worker, None)
                if peer is not None and any(peer.models):
                    self.apart[worker] = peer.models
            for worker in list(self.apart)[:-MOST_APART]:
                del self.apart[worker]
            self._renumber()

    def models_of(self, worker: str) -> tuple[int, int]:
        """Which step times and which acceptance a worker shares with others; (0, 0) unless it is unlike them."""
        peer = self.peers.get(worker)
        times, acceptance = self.apart.get(worker, (0, 0)) if peer is None else peer.models
        return times, acceptance

    def unused(self, place: int, num_models: int) -> int:
        """A model that no worker has, of so many, or the next."""
        used = {peer.models[place] for peer in self.peers.values()} | {models[place] for models in self.apart.values()}
        return next(model for model in range(1, num_models + 1) if model not in used)

    def _move(self, cells: FloatArray) -> None:
        """Keep the peers' cells elsewhere."""
        self.cells = cells
        for at, peer in enumerate(self.peers.values()):
            peer.mean_log, peer.as_seen, peer.count = cells[:, at]

    def tells_apart(self, worker: str) -> bool:
        """Whether the worker is known by itself, or will be."""
        return worker in self.peers or len(self.peers) < MOST_WORKERS

    def say(self, spans: Spans, parts: Parts, judged: Judged, count: FloatArray) -> tuple[FloatArray, FloatArray]:
        """What each report of a group counts for, and the log time that its worker is known to take longer, both [n].

        Accepted tokens, what the model of the group expected, and the variance of that are added to what is known of each
        worker. judged: of the parts; count: steps of each report.
        """
        weights, offsets = np.ones(len(count)), np.zeros(len(count))
        peers = [self.peers.get(worker) for worker, _ in spans]
        alone = len(self.peers) < 2
        new = alone or any(peer is not None and not peer.compared for peer in peers)
        elsewhere = self.elsewhere() if new else []
        if not alone or elsewhere:
            ends = parts.report.searchsorted([0, *(span.stop for _, span in spans)]).tolist()
            load, tokens = parts.kinds * self.num_bands + parts.bands, np.array(judged).T
            for peer, (_, span), size, start, end in zip(
                peers, spans, *summed(spans, [count]), ends, ends[1:], strict=False
            ):
                if peer is not None:
                    fade = math.exp(-size / MEMORY_REPORTS)
                    peer.num_told = peer.num_told * fade + size
                    weights[span], offsets[span] = self._weight(peer, elsewhere), peer.offset
                    peer.tokens *= fade
                    np.add.at(peer.tokens, load[start:end], tokens[start:end])
        return weights, offsets

    def note_review(self, worker: str, kind: int, share_right: float) -> None:
        """A worker has reviewed an output of a class, so many of whose tokens would have been proposed."""
        peer = self.peers.get(worker)
        if peer is not None:
            peer.num_reviews += 1
            peer.reviewed *= math.exp(-1.0 / MEMORY_REVIEWS)
            peer.reviewed[kind] += USUAL_TOKENS * np.array([share_right, 0.5, USUAL_TOKENS * RIGHT_SD**2 / DISPERSION])

    def most_review(self, senders: Sequence[str]) -> bool:
        """Whether most of those who share an acceptance with these senders, of one group, send reviews."""
        mine = next((peer.models[ACCEPTANCE] for name in senders if (peer := self.peers.get(name)) is not None), 0)
        sharing = [peer for peer in self.peers.values() if peer.models[ACCEPTANCE] == mine]
        sharing += self._elsewhere(mine)
        return 2 * sum(peer.num_reviews > 0 for peer in sharing) > len(sharing)

    def _weight(self, peer: Peer, elsewhere: Sequence[Peer]) -> float:
        """What a report counts for: as much as any, but a worker not yet compared has no more say than the others."""
        if peer.compared:
            return 1.0
        others = [each.num_told for each in self.peers.values() if each is not peer]
        others += [] if peer.models[ACCEPTANCE] else [each.num_told for each in elsewhere]
        if not others:
            return 1.0
        fair = (sum(others) + 8.0) / len(others)
        return min(1.0, max(LEAST_WEIGHT, fair / max(peer.num_told, 1.0)))

    def record_times(
        self, spans: Spans, cell: np.ndarray, log_s: FloatArray, surprise: FloatArray, speed: ByStep, count: FloatArray
    ) -> None:
        """Add log times of a group's reports, each of so many steps; those of workers who are no peers come last.

        surprise: over the shared model's usual ones. speed: of the moment. What a step takes longer than others of its
        worker counts for little: pauses make no suspect. The model is no yardstick: another may have spoiled it.
        """
        spans = [each for each in spans if each[0] in self.peers]
        if not spans:
            return
        peers, size = [self.peers[worker] for worker, _ in spans], spans[-1][1].stop
        if size < len(cell):
            speed = speed[:size] if isinstance(speed, np.ndarray) else speed
            cell, log_s, surprise, count = cell[:size], log_s[:size], surprise[:size], count[:size]
        told = surprise.tolist()
        # One step that was quicker than believed makes no pause of those that follow it.
        usual = [middle(told[span], max(peer.level, 0.0)) for peer, (_, span) in zip(peers, spans, strict=True)]
        pause = np.maximum(surprise - (by_step(spans, usual) + MOST_SLOWER), 0.0)
        log_s, over = log_s - pause, (surprise - pause) * count
        for peer, total, mean in zip(peers, *summed(spans, [count, over]), strict=True):
            fade = math.exp(-total / MEMORY_REPORTS)
            peer.count *= fade
            peer.num_reports = peer.num_reports * fade + total
            peer.level += (mean / total - peer.level) * total / peer.num_reports
        width = self.cells.shape[2]
        at = (
            np.repeat([self.place[worker] * width for worker, _ in spans], [at.stop - at.start for _, at in spans])
            + cell
        )
        mean_log, as_seen, counts = self.cells.reshape(3, -1)
        np.add.at(counts, at, count)
        share = count / counts[at]
        np.add.at(mean_log, at, (log_s - speed - mean_log[at]) * share)
        np.add.at(as_seen, at, (log_s - as_seen[at]) * share)

    def due(self, num_reports: int) -> bool:
        """Whether it is time to compare."""
        self.since_compared += num_reports
        if self.since_compared < ROUND_REPORTS * len(self.peers):
            return False
        if len(self.peers) < 2 and not self.elsewhere():
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
        total, weighted = count.sum(axis=0), (count * mean).sum(axis=0)
        level = np.array([peer.level for _, peer in members])
        others = (level.sum() - level) / (len(level) - 1)
        excess = differs(mean, count, weighted - count * mean, total - count, noise)
        for (_, peer), known, offset in zip(members, excess.tolist(), (level - level.mean()).tolist(), strict=True):
            peer.compared, peer.offset = peer.compared or known != UNKNOWN, offset
        score = np.maximum(excess / UNLIKE_TIMES**2, np.abs(level - others) / UNLIKE_FACTOR)
        worst = int(score.argmax())
        return members[worst][0] if score[worst] > 1.0 else None

    def unlike_in_acceptance(self, model: int) -> str | None:
        """The worker whose accepted tokens differ most from what the others' lead to expect, if one does.

        Load by load: where one alone has taught the model what to expect, it meets that, and the others do not. Of two it
        does not matter which is set apart, so little evidence is enough: all loads together. Those of the pair's other
        contexts are compared, too; one of them is set apart by its own.
        """
        mine = self.sharing(ACCEPTANCE, model)
        members = [peer for _, peer in mine] + [
            peer for peer in self._elsewhere(model) if peer.num_told >= ENOUGH_REPORTS
        ]
        if not mine or len(members) < 2:
            return None
        score = _unlike(_aligned([peer.tokens for peer in members]))
        reviewing = [at for at, peer in enumerate(members) if peer.num_reviews >= ENOUGH_REVIEWS]
        if len(reviewing) > 1:
            of_reviews = _unlike(np.stack([members[at].reviewed for at in reviewing]))
            score[reviewing] = np.maximum(score[reviewing], of_reviews)
        worst = int(score.argmax())
        return mine[worst][0] if worst < len(mine) and score[worst] > 0.0 else None

    def _elsewhere(self, model: int) -> list[Peer]:
        """Peers of other contexts that share this acceptance: the first is the pair's, all others are of workers here."""
        return [] if model else self.elsewhere()

    def sharing(self, place: int, model: int) -> list[tuple[str, Peer]]:
        """Workers with enough reports of it that share a model of step times or acceptance."""
        told = {TIMES: "num_reports", ACCEPTANCE: "num_told"}[place]
        enough = ((worker, peer) for worker, peer in self.peers.items() if getattr(peer, told) >= ENOUGH_REPORTS)
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
        nothing = np.zeros(self.cells.shape[2])
        count = sum((peer.count for peer in members), nothing)
        total = sum((peer.count * (peer.as_seen - peer.offset) for peer in members), nothing)
        return total / np.maximum(count, 1e-9), np.minimum(count, most)

    def renew(self) -> None:
        """Peers after a state was restored."""
        width = self.cells.shape[2]
        self.peers = {
            worker: restored(Peer(np.zeros((3, width)), self.num_loads), state) for worker, state in self.peers.items()
        }
        self._renumber()

    def _renumber(self) -> None:
        """Lay out the peers' cells anew."""
        width = self.cells.shape[2]
        self.place = {worker: at for at, worker in enumerate(self.peers)}
        cells = np.zeros((3, len(self.peers) + 1, width))
        for at, peer in enumerate(self.peers.values()):
            cells[:, at] = peer.mean_log, peer.as_seen, peer.count
        self._move(cells)


def _aligned(tokens: Sequence[FloatArray]) -> FloatArray:
    """Tokens by class and load of contexts with fewer bands of load and with more, [workers, loads, 3]."""
    by_class = [each.reshape(NUM_CLASSES, -1, 3) for each in tokens]
    bands = max(each.shape[1] for each in by_class)
    padded = [np.pad(each, ((0, 0), (0, bands - each.shape[1]), (0, 0))) for each in by_class]
    return np.stack(padded).reshape(len(tokens), -1, 3)


def _unlike(tokens: FloatArray) -> FloatArray:
    """By how much, in logs, workers' accepted tokens differ from what the others' lead to expect; 0 if that may be chance.

    tokens: accepted, expected, and variance, [workers, loads, 3].
    """
    if len(tokens) == 2:
        tokens = tokens.sum(axis=1, keepdims=True)
    sent = tokens[..., 1].sum(axis=1)
    # Everybody has the same say, however much it sends; who drafts nothing has none, and takes none from others.
    least = sent.min(initial=np.inf, where=sent >= 1.0)
    tokens = tokens * np.minimum(1.0, 2.0 * least / np.maximum(sent, 1e-9))[:, None, None]
    others = tokens.sum(axis=0) - tokens
    ratio = (others[..., 0] + 1.0) / (others[..., 1] + 1.0)
    shared = others[..., 1] / np.maximum(others[..., 1] + tokens[..., 1], 1e-9)  # how well the others know a load
    mine = (shared * tokens[..., 0]).sum(axis=1)
    theirs = (shared * ratio * tokens[..., 1]).sum(axis=1)
    z = np.abs(mine - theirs) / np.sqrt(DISPERSION * ((shared * tokens[..., 2]).sum(axis=1) + 1.0))
    size = np.abs(np.log((mine + 1.0) / (theirs + 1.0)))
    score: FloatArray = np.where((size > UNLIKE_ACCEPTANCE) & (z > SIGNIFICANT), size, 0.0)
    return score


def differs(
    mean: FloatArray, count: FloatArray, others_sum: FloatArray, others_count: FloatArray, noise: float
) -> FloatArray:
    """Mean square by which workers' log times in their cells differ from others', beyond a constant factor and noise, [n].

    All arguments: [n, cells]. UNKNOWN where too few cells are shared to tell.
    """
    weight = count * others_count / (count + others_count + 1e-9)
    weight[weight < 0.5] = 0.0
    total, shared = weight.sum(axis=1), np.count_nonzero(weight, axis=1)
    sure = np.maximum(total, 1e-9)
    difference = np.minimum(np.maximum(mean - others_sum / np.maximum(others_count, 1e-9), -3.0), 3.0)
    factor = (weight * difference).sum(axis=1) / sure
    excess = (weight * (difference - factor[:, None]) ** 2).sum(axis=1) / sure
    beyond = np.maximum(excess - 2.0 * noise * noise * shared / sure, 0.0)
    return np.where(total < ENOUGH_REPORTS / 2.0, UNKNOWN, beyond)


def middle(values: Sequence[float], usual: float) -> float:
    """The median of three or more, else what is usual."""
    return sorted(values)[len(values) // 2] if len(values) >= 3 else usual
