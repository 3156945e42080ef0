"""Everything believed about one context: its step times, and its view of the acceptance that its pair shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, compress, groupby
from typing import Any

import numpy as np

from speclen.controller.estimator.acceptance import AcceptanceModel, band_of
from speclen.controller.estimator.agreement import LARGEST_FLEET, Agreement
from speclen.controller.estimator.arrays import FloatArray, distinct
from speclen.controller.estimator.core import (
    Bucket,
    ContextKey,
    DriftEvent,
    LengthEstimate,
    Limits,
    Profile,
    StepObservation,
)
from speclen.controller.estimator.latency import LatencyModel

# What can be believed of a step, in seconds: beyond it the numbers have lost their meaning, not the device its speed.
LEAST_SECONDS, MOST_SECONDS = 1e-12, 1e6
# Log of anything relative that can be believed: a factor of 1e13.
MOST_LOG = 30.0
# Rows that can be behind a count.
MOST_COUNT = 1e15
# The widest interval told, as a factor around the estimate: it says that nothing is known, and stays a number.
MOST_SPREAD = 500.0

# Resumptions over which their cost is averaged, and the most that one may count, in usual steps.
RESUMES_REMEMBERED = 20
LARGEST_RESUME_STEPS = 5.0


class ContextModel:
    """Learns from groups of observations and predicts time and tokens of every bucket and length.

    tokens, seconds: [buckets, lengths], expected tokens per row and step, and mean step time.
    """

    def __init__(
        self, key: ContextKey, limits: Limits, buckets: tuple[Bucket, ...], acceptance: AcceptanceModel
    ) -> None:
        self.key = key
        self.limits = limits
        self.buckets = buckets
        self.acceptance = acceptance
        self.latency = LatencyModel(buckets, limits.max_speculation_length)
        self.agreement = Agreement(limits.max_speculation_length + 1)
        # What resuming after length 0 costs on top of an ordinary step (the draft catches up), in seconds.
        self.resume_s = 0.0
        self.num_resumes = 0
        self.last_length: dict[str, int] = {}  # by worker, of its newest step; the longest silent first
        self._band_batches()
        self.refresh()

    def _band_batches(self) -> None:
        self.bands = np.array([band_of(bucket.batch_max) for bucket in self.buckets])
        self.band_of_size = np.array([0, *(band_of(size) for size in range(1, self.limits.max_batch_size + 1))])

    def extend(self, limits: Limits, buckets: tuple[Bucket, ...]) -> None:
        """Make room for larger limits, keeping what was learned."""
        self.limits, self.buckets = limits, buckets
        self.latency.extend(buckets, limits.max_speculation_length)
        self.agreement.extend(limits.max_speculation_length + 1)
        self._band_batches()
        self.refresh()

    def seed(self, profile: Profile) -> None:
        """Start step times from a profile, unless steps have already told more; see AcceptanceModel.seed for the rest."""
        if self.latency.num_reports == 0:
            self.latency.seed(profile)
        self.refresh()

    def refresh(self) -> None:
        """Bring tokens and seconds up to date with both models."""
        count = self.limits.max_speculation_length + 1
        self.tokens: FloatArray = self.acceptance.expected_tokens[self.bands, :count]
        self.seconds: FloatArray = self.latency.predict()

    def learn(self, observations: Sequence[StepObservation], workers: Sequence[str]) -> list[DriftEvent]:
        """Update both models with a group; returns what drifted.

        workers: who sent each observation; those of one worker stand side by side.
        """
        events = []
        steps = StepColumns(observations)
        fired = self._learn_acceptance(steps)
        if fired:
            events.append(self._event("acceptance", fired))
        for worker_id, span in spans_of(workers):
            self._learn_resuming(observations[span], worker_id)
        fired = self._learn_latency(steps, workers)
        if fired:
            events.append(self._event("latency", fired))
        self.refresh()
        return events

    def _learn_acceptance(self, steps: StepColumns) -> float:
        positions, length = self.acceptance.max_length, steps.length
        width = length + 1
        last = width.cumsum()
        values = np.fromiter(chain.from_iterable(steps.histograms), float, int(last[-1]))
        # Where each report's histogram goes in a table of equal rows: its own row, from the first column on.
        place = np.arange(len(values)) + np.repeat(np.arange(len(length)) * (positions + 2) - (last - width), width)
        histogram = np.zeros((len(length), positions + 2))
        histogram.reshape(-1)[place] = values
        histogram[~steps.teaches_acceptance] = 0.0
        # at_least[:, i]: rows with i or more accepted. Position i is judged in rows with i - 1 or more, up to the length.
        at_least = histogram[:, ::-1].cumsum(axis=1)[:, ::-1]
        inside = np.arange(positions) < length[:, None]
        bands = self.band_of_size[steps.batch]
        return self.acceptance.update(at_least[:, 1:-1] * inside, at_least[:, :-2] * inside, bands)

    def _learn_latency(self, steps: StepColumns, workers: Sequence[str]) -> float:
        teaches = steps.teaches_latency
        if not teaches.any():
            return 0.0
        size, length = steps.batch[teaches].astype(float), steps.length[teaches]
        context, seconds = steps.context[teaches], steps.seconds[teaches]
        senders = list(compress(workers, teaches.tolist()))
        names, sender = distinct(senders)
        offsets, trusted = self.agreement.judge(names)
        offset, use = offsets[sender], trusted[sender]
        deviation = np.zeros(len(size))
        if not trusted.all():
            self._leave_out(list(compress(names, ~trusted)), senders, size)
            odd = ~use
            deviation[odd] = self.latency.residuals(size[odd], length[odd], context[odd], seconds[odd])
        self.agreement.readmit(list(compress(names, trusted)))
        fired = 0.0
        if use.any():
            fired, residual = self.latency.update(
                size[use], length[use], context[use], seconds[use], offset[use], list(compress(senders, use.tolist()))
            )
            deviation[use] = residual + offset[use]
            if fired:
                self.agreement.forget()
        self.agreement.record(names, sender, length, deviation)
        return fired

    def _leave_out(self, excluded: list[str], senders: list[str], size: FloatArray) -> None:
        """Reports of these workers are not learned from; what was, a moment ago, is doubted."""
        for worker_id in excluded:
            mine = [index for index, sender in enumerate(senders) if sender == worker_id]
            if self.agreement.exclude(worker_id, len(mine)):
                self.latency.doubt(size[mine])

    def _learn_resuming(self, observations: Sequence[StepObservation], worker_id: str) -> None:
        """Track what the first step with draft tokens after length 0 takes longer: the draft catches up in it.

        Workers flag such a step, so that it teaches no latency. Other flags may fall on it, hence the bounds.
        """
        previous = self.last_length.pop(worker_id, -1)
        for each in observations:
            length = each.speculation_length
            if previous == 0 and length > 0 and not each.teaches_latency and self.latency.known:
                usual = float(self.seconds[self.latency.bucket_of[each.batch_size], length])
                extra = min(max(each.latency_s - usual, 0.0), LARGEST_RESUME_STEPS * usual)
                self.num_resumes += 1
                self.resume_s += (extra - self.resume_s) / min(self.num_resumes, RESUMES_REMEMBERED)
            previous = length
        self.last_length[worker_id] = previous
        if len(self.last_length) > LARGEST_FLEET:
            del self.last_length[next(iter(self.last_length))]

    def _event(self, factor: str, statistic: float) -> DriftEvent:
        direction = "rose" if statistic > 0 else "fell"
        if factor == "acceptance":
            detail = f"accepted tokens {direction} against expectation; 95% of the acceptance counts were forgotten"
        else:
            detail = f"step times {direction} against prediction; the latency surface may move again, cells were kept"
        return DriftEvent(self.key, factor, statistic, detail)

    def sound(self) -> bool:
        """Whether every number can still be worked with; where not, the context has to start anew."""
        return (
            within(self.seconds, LEAST_SECONDS, MOST_SECONDS)
            and within(self.tokens, 1.0, self.tokens.shape[1] + 1e-6)
            and math.isfinite(self.resume_s)
            and latency_is_sound(self.latency)
            and acceptance_is_sound(self.acceptance)
        )

    def estimates(self, bucket: int) -> list[LengthEstimate]:
        """What is believed about every length in one bucket, with 95% intervals."""
        latency, tokens = (
            self.latency.log_variance(bucket),
            self.acceptance.log_tokens_variance(int(self.bands[bucket])),
        )
        out = []
        for length in range(self.limits.max_speculation_length + 1):
            expected, seconds = float(self.tokens[bucket, length]), float(self.seconds[bucket, length])
            spread = min(
                math.exp(min(1.96 * math.sqrt(float(latency[length] + tokens[length])), MOST_LOG)), MOST_SPREAD
            )
            ms = 1e3 * seconds / expected
            out.append(LengthEstimate(length, expected, seconds, ms, ms / spread, ms * spread))
        return out

    def export_state(self) -> dict[str, Any]:
        """JSON-able values from which to go on, the pair's acceptance not included."""
        return {
            "latency": self.latency.export_state(),
            "fleet": self.agreement.export_state(),
            "resume_s": self.resume_s,
            "num_resumes": self.num_resumes,
            "last_length": list(self.last_length.items()),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from an exported state."""
        self.latency.restore(state["latency"])
        self.agreement.restore(state["fleet"])
        self.resume_s, self.num_resumes = float(state["resume_s"]), int(state["num_resumes"])
        self.last_length = {worker_id: int(length) for worker_id, length in state["last_length"]}
        self.refresh()


class StepColumns:
    """A group of observations as arrays [n]; batch, length: whole numbers."""

    __slots__ = ("batch", "context", "histograms", "length", "seconds", "teaches_acceptance", "teaches_latency")

    def __init__(self, observations: Sequence[StepObservation]) -> None:
        batch, length, seconds, self.histograms, context, teaches_latency, teaches_acceptance, _ = zip(
            *observations, strict=True
        )
        self.batch, self.length = np.array(batch), np.array(length)
        self.seconds, self.context = np.array(seconds), np.array(context)
        self.teaches_latency, self.teaches_acceptance = np.array(teaches_latency), np.array(teaches_acceptance)


def within(values: FloatArray, least: float, most: float) -> bool:
    """Whether all values lie in [least, most]; NaN lies nowhere."""
    return values.size == 0 or bool(least <= values.min() and values.max() <= most)


def latency_is_sound(model: LatencyModel) -> bool:
    """Whether weights, variances and deviations are numbers of a believable size."""
    return (
        math.isfinite(model.mean.sum())
        and math.isfinite(model.covariance.sum())
        and within(model.variance, 0.0, MOST_LOG**2)
        and within(model.rho, -MOST_LOG, MOST_LOG)
        and abs(model.speed) <= MOST_LOG
        and math.isfinite(model.sigma)
    )


def acceptance_is_sound(model: AcceptanceModel) -> bool:
    """Whether the counts are counts and the shares are shares."""
    counts = (model.reached, model.accepted, model.band_reached, model.band_accepted)
    return all(within(values, 0.0, MOST_COUNT) for values in counts) and within(model.band_acceptance, 0.0, 1.0)


def spans_of(workers: Sequence[str]) -> list[tuple[str, slice]]:
    """Each worker with its place in the group. A worker that appears twice has two places."""
    spans, start = [], 0
    for worker_id, members in groupby(workers):
        end = start + sum(1 for _ in members)
        spans.append((worker_id, slice(start, end)))
        start = end
    return spans
