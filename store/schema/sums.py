"""Reports that stand for several steps: columns of the step m009."""

from __future__ import annotations

CHANGES = (
    # Steps that the report stands for, which were alike. Where these are several: seq is of the first, latency_s and
    # mean_context_length are means, the histograms are sums, num_accepted_tokens is per step and rounded down.
    "ALTER TABLE step_reports ADD COLUMN num_steps INTEGER NOT NULL DEFAULT 1 CHECK (num_steps BETWEEN 1 AND 65536)",
    # Standard deviation of their latencies; NULL for a single step.
    "ALTER TABLE step_reports ADD COLUMN latency_sd_s REAL CHECK (latency_sd_s IS NULL OR latency_sd_s >= 0)",
)
