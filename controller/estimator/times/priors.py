"""What step times begin with before any report of their own: a profile, other workers, or what was known at first."""

from __future__ import annotations

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.core import Limits, Profile
from speclen.controller.estimator.times.change import Watch
from speclen.controller.estimator.times.step_time import (
    CELL_SD,
    KEPT_LEFT_OVER,
    LEAST_EVIDENCE,
    LONGEST_S,
    NOISE,
    SHORTEST_S,
    StepTimes,
)
from speclen.controller.estimator.times.surface import FIXED, prior

# What a profile counts for: log-sd of its cells where it was measured here and elsewhere; what all may have wrong.
PROFILE_SD, FOREIGN_SD, PROFILE_MOVED_SD, PROFILE_COMMON_SD = 0.1, 0.4, 0.2, 0.2
PROFILE_KEPT = 0.5
# Where a worker turned out to be unlike: log-sd by which each weight may be off of what it starts with, and of what was
# believed with its reports.
UNLIKE_SD, SPOILED_SD = 1.0, 0.3


def check_profile(profile: Profile, limits: Limits) -> None:
    """Raises ValueError for cells beyond the limits."""
    for cell in profile.cells:
        for name, least, most in (
            ("batch_size", 1, limits.max_batch_size),
            ("speculation_length", 0, limits.max_speculation_length),
        ):
            if not least <= getattr(cell, name) <= most:
                raise ValueError(f"profile cell has {name} {getattr(cell, name)}, allowed: {least} to {most}")


def seed(times: StepTimes, profile: Profile) -> None:
    """Start from an offline profile: a surface through its cells, which may all be off, and half of what it leaves."""
    batch, length, seconds, context = (
        np.array([getattr(cell, name) for cell in profile.cells])
        for name in ("batch_size", "speculation_length", "step_s", "mean_context_length")
    )
    log_s, cell = np.log(np.clip(seconds, SHORTEST_S, LONGEST_S)), times.cell_of(batch, length)
    surface = times.surface
    rows = surface.of_length(batch, length, context)
    surface.restart(*scaled(rows, log_s, len(surface.knots)))
    sd = FOREIGN_SD if profile.as_prior else PROFILE_SD
    surface.fit(rows, log_s, np.full(len(rows), sd * sd))
    times.rho[:], times.profiled[cell], times.usual_context[:] = 0.0, 1.0, context.mean()
    if not profile.as_prior:
        times.rho[cell] = PROFILE_KEPT * (log_s - np.log(rows @ np.exp(surface.phi)))
        np.clip(times.rho, -KEPT_LEFT_OVER * CELL_SD, KEPT_LEFT_OVER * CELL_SD, out=times.rho)
    times.begin(surface.phi, surface.loosened(PROFILE_MOVED_SD, PROFILE_COMMON_SD))


def begin_like(times: StepTimes, other: StepTimes) -> None:
    """Begin as another began, of the same cells, for a worker that is unlike the others."""
    times.noise, times.usual_context = other.noise, other.usual_context.copy()
    if other.origin.any():
        times.surface.restart(other.origin[0], other.origin[1:])
        times.begin(other.origin[0], times.surface.loosened(UNLIKE_SD, UNLIKE_SD))


def seed_from(times: StepTimes, other: StepTimes, moved_sd: float) -> None:
    """Start from what is believed of other workers' steps, of which every weight may be off by so much."""
    if not other.known:
        return
    theirs, (phi, covariance) = other.surface, prior(len(times.surface.knots))
    size = min(len(phi), len(theirs.phi))
    phi = phi + (theirs.phi[0] - phi[0])
    phi[:size] = theirs.phi[:size]
    covariance[:size, size:] = covariance[size:, :size] = 0.0
    covariance[:size, :size] = theirs.loosened(moved_sd, moved_sd)[:size, :size]
    times.noise = other.noise
    buckets, lengths = min(len(times.buckets), len(other.buckets)), min(times.num_lengths, other.num_lengths)
    times.grid(times.rho)[:buckets, :lengths] = other.grid(other.kept())[:buckets, :lengths]
    times.begin(phi, covariance)


def rebuild(times: StepTimes, mean_log: FloatArray, evidence: FloatArray) -> None:
    """Replace the evidence, and what was believed: some of it came from a worker that does not belong here."""
    seen, surface = evidence > LEAST_EVIDENCE, times.surface
    times.context = np.repeat(times.usual_context, times.num_lengths)
    times.rho[:], times.watch, times.noise, times.quickest = 0.0, Watch(), NOISE, []
    if times.origin.any():
        surface.restart(times.origin[0], times.origin[1:])
        times.start(times.origin[0], surface.loosened(SPOILED_SD, SPOILED_SD))
    elif seen.any():
        rows = surface.of_length(times.rows[seen], times.lengths[seen], times.context[seen])
        times.start(*scaled(rows, mean_log[seen], len(surface.phi) - FIXED))
    times.known = bool(seen.any()) or bool(times.origin.any())
    times.mean_log, times.evidence = mean_log, evidence
    times.seen_at[:], times.heard_at = times.clock, [float(times.clock)] * len(times.buckets)
    times.fit()


def scaled(rows: FloatArray, log_s: FloatArray, num_knots: int) -> tuple[FloatArray, FloatArray]:
    """Mean and covariance of weights of which nothing is known but the scale: that of the quickest of these times.

    rows: features of the steps, [n, weights].
    """
    phi, covariance = prior(num_knots)
    return phi + float(np.min(log_s - np.log(rows @ np.exp(phi)))), covariance
