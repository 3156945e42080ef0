"""Settings of the estimator: every number that decides, with its unit and its reason."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


def _field(default: float, reason: str) -> float:
    value: float = Field(default, description=reason, gt=0, allow_inf_nan=False)
    return value


class EstimatorSettings(BaseModel):
    """Constants of an `Estimator`. `model_copy(update={...})` makes a variant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Choice and exploration.
    hysteresis: float = _field(
        0.002, "log score by which another arm must be better: arms that are level take no turns"
    )
    cold_length: int = Field(
        default=2, ge=0, description="draft tokens before anything was seen: rarely far from the best"
    )
    explored: float = _field(0.015, "share of the time that probes may lose: a hundredth is not noticed")
    least_cost: float = _field(0.2, "least loss of a probe's step, in steps: it bounds probes of arms that seem level")
    optimism: float = _field(2.0, "standard deviations by which an arm may be better than expected")
    near: float = _field(1.5, "factor between batch sizes where a probe may run, and whose samples make a size known")
    solve_reports: int = Field(
        default=32, ge=1, description="reports between two solutions: rarer ones lose 0.4 points"
    )
    kept: float = _field(
        0.25, "share of the evidence that is kept when a change is detected: new evidence soon outweighs it"
    )
    # Step times.
    range_width: float = _field(0.12, "of a batch range, relative to its first size: up to 16 each size is one")
    max_cells: int = Field(
        default=64, ge=8, description="cells with evidence: recorded loads had 52, and more score alike"
    )
    gain: float = _field(0.4, "weight of the newest step in the mean that a step is compared with")
    memory: float = _field(400.0, "contrasts between cells after which older ones have faded to 1/e")
    clip: float = _field(1.5, "standard deviations beyond which a contrast is clipped (Huber): levels jump")
    noise: float = _field(0.09, "standard deviation of a contrast before it is learned, as on an H200")
    surprise: float = _field(
        3.0, "mean square of surprises, in variances, at which contrasts are forgotten: 2.5 alarmed falsely"
    )
    residual: float = _field(0.04, "standard deviation of a cell's residual: padding and tile sizes")
    profile_sd: float = _field(0.1, "standard deviation of a profile's log step times before live ones are seen")
    # Tokens per step.
    first_accepted: float = _field(0.7, "acceptance of a draft token before anything was seen")
    prior_tokens: float = _field(
        128.0, "tokens, or trials of a draft position, that a prior counts for: about one output"
    )
    long_memory: float = _field(100.0, "requests over which tokens per step are averaged")
    short_memory: float = _field(
        8.0, "outputs, or steps, over which changed text is looked for: 16 were slower to notice"
    )
    request_steps: float = _field(256.0, "steps of a sequence that count as one request where none begins")
    request_sd: float = _field(0.3, "least standard deviation of the log tokens per step among requests")
    change: float = _field(4.0, "standard errors between both means that are a change of the text")
    # Workers.
    worker_difference: float = _field(0.2, "log difference to the other workers at which a worker is isolated")
