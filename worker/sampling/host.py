"""Choice of tokens on the host, in numpy, for batches on a CPU.

No row may have top-k, top-p, min-p, penalties or a grammar; greedy rows may be among them.

It implements both acceptance rules of `verification`, one distribution at a time: columns without a proposal, or after a
rejection, cost nothing, and the noise of a draft token is drawn once. `rules.SamplingRule` handles rows of all kinds on any
device. Greedy and seeded rows get the same tokens from both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from speclen.worker.sampling import noise
from speclen.worker.sampling.verification import num_matching

MIN_TEMPERATURE = 1e-6  # division by less could overflow, and only the most likely token is drawn anyway


class HostSettings:
    """Sampling settings of a batch as arrays. Made once per change of the batch.

    temperatures: [rows], 0 for greedy. keys: [rows], int64, of `noise`, for the rows that are `seeded`.
    """

    def __init__(self, temperatures: np.ndarray, keys: np.ndarray, seeded: np.ndarray) -> None:
        self.temperatures = np.maximum(temperatures, MIN_TEMPERATURE).astype(np.float32)
        self.keys = keys
        self.seeded, self.unseeded = (temperatures > 0) & seeded, (temperatures > 0) & ~seeded
        self.any_seeded, self.any_unseeded = bool(self.seeded.any()), bool(self.unseeded.any())
        self.any_samples = self.any_seeded or self.any_unseeded


class HostRule:
    """A `TokenRule` for one step. positions: number of output tokens of each row before the step.

    num_ngrams: [rows], n-gram tokens in each row's proposal, which precede draft tokens; None for none.
    """

    def __init__(
        self,
        rows: HostSettings,
        positions: Sequence[int],
        generator: torch.Generator | None,
        num_ngrams: np.ndarray | None = None,
    ) -> None:
        # After a forward pass the code of every array operation is read from memory, so greedy rows skip most of them.
        self._rows, self._positions, self._generator = rows, positions, generator
        self._num_ngrams = num_ngrams
        # By row and place after its output.
        self._noise: dict[tuple[int, int], np.ndarray] = {}
        self._drawn_from: dict[tuple[int, int], tuple[np.ndarray, float]] = {}  # scores of the draft, and their sum

    def draft(self, logits: np.ndarray, rows: np.ndarray, num_drafted: int) -> np.ndarray:
        """The next draft tokens [n] of some rows, which have num_drafted already. logits: [n, vocab]."""
        if not self._rows.any_samples:
            return logits.argmax(-1)
        ahead = np.full(len(rows), num_drafted) + (0 if self._num_ngrams is None else self._num_ngrams[rows])
        logits, likeliest, _ = _usable(logits)
        ids = self._choose(logits, likeliest, rows, ahead)
        if self._rows.any_unseeded:
            (drawing,) = np.nonzero(self._rows.unseeded[rows])
            uniform = self._uniform(len(drawing))
            for at, share in zip(drawing.tolist(), uniform, strict=True):
                scores = self._scores(logits[at], rows[at])
                ids[at], total = _drawn(scores, share)
                self._drawn_from[int(rows[at]), int(ahead[at])] = scores, total
        return ids

    def verify_even(self, logits: np.ndarray, proposed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `verify`, if all rows propose the same number of tokens. logits: [b, k + 1, vocab]."""
        if self._rows.any_samples:
            num_proposed = np.full(len(proposed), proposed.shape[1])
            return self.verify(logits.reshape(-1, logits.shape[-1]), *places_of(num_proposed), proposed, num_proposed)
        num_columns = proposed.shape[1] + 1
        _, likeliest, broken = _usable(logits.reshape(-1, logits.shape[-1]))
        chosen = likeliest.reshape(-1, num_columns)
        accepted = num_matching(proposed, chosen) if proposed.shape[1] else np.zeros(len(proposed), np.int64)
        return _cut(accepted, broken // num_columns, broken % num_columns), chosen

    def verify(
        self, logits: np.ndarray, rows: np.ndarray, columns: np.ndarray, proposed: np.ndarray, num_proposed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Accepted lengths [b], and tokens [b, k + 1]: the first accepted + 1 tokens of a row are its output.

        logits: [n, vocab], row after row: logits[i] follow the first columns[i] proposed tokens of rows[i]. proposed: [b,
        k], of which row r proposes the first num_proposed[r].
        """
        logits, likeliest, broken = _usable(logits)
        tokens = np.zeros((len(proposed), proposed.shape[1] + 1), np.int64)
        tokens[rows, columns] = self._choose(logits, likeliest, rows, columns)
        num_accepted = num_matching(proposed, tokens, num_proposed)
        if self._rows.any_unseeded:
            shares = self._uniform(len(rows))
            begins = rows.searchsorted(np.arange(len(proposed) + 1)).tolist()
            for row in np.nonzero(self._rows.unseeded)[0].tolist():
                mine = slice(begins[row], begins[row + 1])
                num_accepted[row], following = self._accept(row, logits[mine], proposed[row], shares[mine])
                tokens[row, : num_accepted[row]] = proposed[row, : num_accepted[row]]
                tokens[row, num_accepted[row]] = following
        return _cut(num_accepted, rows[broken], columns[broken]), tokens

    def _choose(self, logits: np.ndarray, ids: np.ndarray, rows: np.ndarray, ahead: np.ndarray) -> np.ndarray:
        """The most likely token; for seeded rows, the winner of the exponential race.

        ids: [n], of the largest logits; overwritten.
        """
        if self._rows.any_seeded:
            (racing,) = np.nonzero(self._rows.seeded[rows])
            if len(racing):
                scores = logits[racing]
                scores -= logits[racing, ids[racing], None]
                ids[racing] = self._race(scores, rows[racing], ahead[racing])
        return ids

    def _race(self, scores: np.ndarray, rows: np.ndarray, ahead: np.ndarray) -> np.ndarray:
        """argmax of unnormalised probabilities over Exp(1) noise.

        scores: logits minus the largest, [n, vocab], overwritten.
        """
        scores /= self._rows.temperatures[rows, None]
        np.exp(scores, out=scores)
        places = list(zip(rows.tolist(), ahead.tolist(), strict=True))
        new = [at for at, place in enumerate(places) if place not in self._noise]
        if new:
            positions = np.array(self._positions)[rows[new]] + ahead[new]
            drawn = noise.exponential_on_host(self._rows.keys[rows[new]], positions, scores.shape[-1])
            self._noise.update(zip([places[at] for at in new], drawn, strict=True))
        for score, place in zip(scores, places, strict=True):
            score /= self._noise[place]
        return scores.argmax(-1)

    def _accept(self, row: int, logits: np.ndarray, proposed: np.ndarray, shares: list[float]) -> tuple[int, int]:
        """Number of proposals of a row that rejection sampling accepts, and the token that follows.

        As `verification.verify`; the draft distribution of an n-gram token is one-hot. logits: [proposals + 1, vocab];
        shares: as many uniform numbers in [0, 1).
        """
        num_proposed = len(logits) - 1
        for column in range(num_proposed):
            scores, token = self._scores(logits[column], row), int(proposed[column])
            total = float(scores.sum(dtype=np.float64))
            drafted = self._drawn_from.get((row, column))
            likely = float(scores[token]) / total
            if shares[column] < (likely if drafted is None else likely * drafted[1] / float(drafted[0][token])):
                continue
            if drafted is None:
                left = scores.copy()
                left[token] = 0.0
            else:
                left = np.maximum(scores - drafted[0] * np.float32(total / drafted[1]), 0.0)
            # If both distributions agree up to rounding, nothing may be left: then the target's is used.
            return column, _drawn(left if left.any() else scores, shares[-1])[0]
        return num_proposed, _drawn(self._scores(logits[-1], row), shares[-1])[0]

    def _scores(self, logits: np.ndarray, row: int) -> np.ndarray:
        """Probabilities relative to the most likely token's."""
        scores = logits - logits.max()
        scores /= self._rows.temperatures[row]
        return np.exp(scores, out=scores)

    def _uniform(self, count: int) -> list[float]:
        drawn: list[float] = torch.rand(count, generator=self._generator, dtype=torch.float64).tolist()
        return drawn

    # As TokenRule, with tensors.

    def propose(self, logits: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
        """As TokenRule."""
        return torch.from_numpy(self.draft(on_host(logits[:, 0]), np.arange(len(logits)), draft_ids.shape[1]))

    def decide(
        self, logits: torch.Tensor, draft_ids: torch.Tensor, caps: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As TokenRule. Tokens beyond a row's cap are undefined."""
        num_rows, length = draft_ids.shape
        num_proposed = np.full(num_rows, length) if caps is None else np.minimum(caps.numpy(), length)
        rows, columns = places_of(num_proposed)
        flat = logits.flatten(0, 1) if caps is None else logits[torch.from_numpy(rows), torch.from_numpy(columns)]
        num_accepted, tokens = self.verify(on_host(flat), rows, columns, draft_ids.numpy(), num_proposed)
        return torch.from_numpy(num_accepted), torch.from_numpy(tokens)


def places_of(num_proposed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each distribution that verification needs: one after the pending token and after each proposal."""
    counts = num_proposed + 1
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - (counts.cumsum() - counts)[rows]


def _usable(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits [n, vocab], the ids [n] of the largest ones, and the indices of rows whose largest one is NaN or infinite.

    The logits of such rows are set to 0. Drafts from them are verified as usual; the target's choices are cut off.
    """
    likeliest = logits.argmax(-1)  # NaN counts as the largest
    (broken,) = np.nonzero(~np.isfinite(logits[np.arange(len(logits)), likeliest]))
    if len(broken):
        logits = logits.copy()
        logits[broken] = 0.0
    return logits, likeliest, broken


def _cut(num_accepted: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """As `verification.cut_at_broken`, given the places of unusable logits."""
    np.minimum.at(num_accepted, rows, columns - 1)
    return num_accepted


def on_host(logits: torch.Tensor) -> np.ndarray:
    """A numpy array; 16-bit logits as float32, since numpy has no bfloat16 and is slow with float16."""
    array: np.ndarray = (logits.float() if logits.itemsize == 2 else logits).numpy()
    return array


def _drawn(scores: np.ndarray, share: float) -> tuple[int, float]:
    """Draw a token by inverting the cumulative scores, not all 0, at share, in [0, 1). Returns it with their sum."""
    sums = scores.cumsum(dtype=np.float64)
    total = float(sums[-1])
    token = int(sums.searchsorted(min(share * total, np.nextafter(total, 0.0)), side="right"))
    return min(token, len(scores) - 1), total  # beyond the last where the model gave no numbers
