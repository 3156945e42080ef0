"""What one run of a track comes to: latencies, throughput, failures, and what the worker did meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speclen.bench.comparison.stats import Distribution, distribution
from speclen.bench.serving.load import RequestOutcome
from speclen.bench.serving.run_track import TrackRun
from speclen.bench.serving.watch import Stretch, counted_stretch, over_time

# A request that was sent this late did not come when the track says, so the run measured another track.
LATE_S = 0.1


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run, over the requests that count and finished.

    Distributions in seconds: latency from the moment the track says to the last token, ttft to the first token,
    tpot per token after the first. normalized: latency per output token. goodput_per_s: requests per second whose
    latency per token is within the target. window_s: from the first counted moment to the last answer.
    failures: counted requests without a full answer, by reason. cpu_share: processor time over window, by process.
    """

    contender: str
    repeat: int
    num_counted: int
    latency: Distribution | None
    ttft: Distribution | None
    tpot: Distribution | None
    normalized: Distribution | None
    goodput_per_s: float
    tokens_per_s: float
    window_s: float
    failures: dict[str, int]
    mean_batch_size: float | None
    mean_length: float | None
    tokens_per_row_step: float | None
    late_s: float
    cpu_share: dict[str, float]
    reports_dropped: int
    warnings: tuple[str, ...]
    over_time: tuple[Stretch, ...]

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())


def summarise(run: TrackRun, counted: Sequence[int], from_s: float, target_s_per_token: float | None) -> RunSummary:
    """counted: positions of the requests that count. target: latency per output token that is good enough."""
    chosen = [run.outcomes[index] for index in counted]
    done = [outcome for outcome in chosen if not outcome.error]
    last = max((outcome.finished_s or 0.0 for outcome in done), default=from_s)
    window = max(last - from_s, 1e-9)
    normalized = [outcome.latency_s / outcome.num_tokens for outcome in done]
    good = sum(value <= target_s_per_token for value in normalized) if target_s_per_token else 0
    stretch = counted_stretch(run.samples, from_s)
    row_steps = sum(outcome.num_steps for outcome in done)
    return RunSummary(
        contender=run.contender,
        repeat=run.repeat,
        num_counted=len(chosen),
        latency=distribution([outcome.latency_s for outcome in done]),
        ttft=distribution([outcome.first_token_s - outcome.at_s for outcome in done if outcome.first_token_s]),
        tpot=distribution([tpot for outcome in done if (tpot := time_per_output_token(outcome)) is not None]),
        normalized=distribution(normalized),
        goodput_per_s=good / window,
        tokens_per_s=sum(outcome.num_tokens for outcome in done) / window,
        window_s=window,
        failures=dict(Counter(outcome.error for outcome in chosen if outcome.error)),
        mean_batch_size=stretch.mean_batch_size if stretch else None,
        mean_length=stretch.mean_length if stretch else None,
        tokens_per_row_step=sum(outcome.num_tokens for outcome in done) / row_steps if row_steps else None,
        late_s=lateness(chosen),
        cpu_share={name: used / run.seconds for name, used in run.cpu_s.items()},
        reports_dropped=run.samples[-1].num_reports_dropped if run.samples else 0,
        warnings=tuple(warnings(run, chosen)),
        over_time=tuple(over_time(run.samples)),
    )


def time_per_output_token(outcome: RequestOutcome) -> float | None:
    """Seconds per token after the first; None for a single token."""
    if outcome.num_tokens < 2 or outcome.finished_s is None or outcome.first_token_s is None:
        return None
    return (outcome.finished_s - outcome.first_token_s) / (outcome.num_tokens - 1)


def lateness(outcomes: Sequence[RequestOutcome]) -> float:
    """99th percentile of how much later than planned requests were sent."""
    return float(np.percentile([outcome.sent_s - outcome.at_s for outcome in outcomes], 99)) if outcomes else 0.0


def warnings(run: TrackRun, outcomes: Sequence[RequestOutcome]) -> list[str]:
    found = [run.worker_exit] if run.worker_exit else []
    late = lateness(outcomes)
    if late > LATE_S:
        found.append(f"the load generator itself was late by {late:.2f} s (99th percentile)")
    if run.samples and run.samples[-1].num_reports_dropped:
        found.append(f"{run.samples[-1].num_reports_dropped} reports were dropped")
    return found
