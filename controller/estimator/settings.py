"""Settings of the estimator: every constant, with its unit and reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EstimatorSettings:
    """Constants of the estimator. `dataclasses.replace` makes a variant."""

    # Choice.
    stays: float = 0.005  # log score by which another arm must be better
    optimism: float = 1.0  # standard deviations
    earned: float = 0.01  # seconds of probes per second of steps
    credit: float = 12.0  # steps' worth of credit to begin with, that can be saved, and that can be owed
    first_after: float = 8.0  # steps after which something is done again, at first
    per_step: float = 0.1  # more of them per step that was seen
    most_gap: float = 120.0  # steps between probes of a size
    unseen: float = 0.5  # error of a log step time where n-grams come or go
    cold_length: int = 2  # draft tokens before anything was seen
    most_pending: float = 512.0  # reports between two solutions
    near_probe: float = 1.5  # factor of batch sizes at which a probe may run
    # Isolation.
    compared: int = 64  # reports of a worker between two comparisons
    unlike_times: float = 0.12  # root mean square difference of log times, beyond a constant factor
    unlike_tokens: float = 0.2  # difference of log tokens per step
    compared_length: int = 4  # draft tokens at which tokens per step are compared
    significant: float = 3.0  # standard deviations
    most_tracked: int = 16  # workers tracked individually
    expired: int = 20_000  # reports of others after which a worker without any has left
    fair_share: float = 2.0  # times the median worker's evidence that one counts for, at most
    # Traffic and profile.
    load_memory: float = 1000.0  # steps over which class mix, prefill and waiting are averaged
    cell_sd: float = 0.8  # of the log step time of a profiled cell
    growth: float = 0.12  # width of a range relative to its first size
    most_cells: int = 192  # of one context
    # Step times.
    first_gain: float = 0.4  # weight of the newest step before, at first and at most
    least_gain: float = 0.05  # at least
    memory: float = 3000.0  # usable samples of a worker after which evidence has faded to 1/e
    clip: float = 1.5  # standard deviations beyond which a contrast is clipped (Huber)
    clipped_loss: float = 1.28  # variance of normal noise over that of the same, clipped there
    noise: float = 0.09  # standard deviation of a contrast at first
    residual: float = 0.04  # standard deviation of rho at first
    least_sd: float = 0.02  # of both
    short_memory: float = 300.0  # samples over which noise, gain and the level are averaged
    # Tokens.
    first_accepted: float = 0.7  # acceptance of the first draft token, unseen
    deeper: float = 0.98  # acceptance of each relative to the one before, unseen
    least_accepted: float = 0.02  # and rejected
    shrinkage: float = 20.0  # trials that the position before counts for
    report_memory: float = 600.0  # reports of a worker after which histograms have faded to 1/e
    output_memory: float = 200.0  # the same for evaluated outputs
    prior_tokens: float = 128.0  # evaluated tokens that histograms count for
    unseen_ngram: float = 1.05  # steps per token of n-gram arms relative to the same length, unseen
    overdispersion: float = 2.0  # variance of accepted runs relative to independent sequences
    alike: float = 0.2  # correlation of a request's steps
    output_sd: float = 0.4  # of the log tokens per step of one output
    slack: float = 0.5  # CUSUM: allowance in standard deviations
    threshold: float = 9.0  # CUSUM: threshold in standard deviations
    largest_z: float = 4.0  # CUSUM: largest step
    kept: float = 0.05  # share that is remembered after it fires


DEFAULT = EstimatorSettings()
current = DEFAULT  # of the newest Estimator: until settings are passed by hand
