"""Priors of a context from elsewhere: an offline profile, or another context on the same hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from speclen.controller.estimator.features import features_of, shares
from speclen.controller.estimator.step_time import RESIDUAL, solve
from speclen.records import Limits, Profile

if TYPE_CHECKING:
    from speclen.controller.estimator.context import Context

CELL_SD = 0.1  # of the log step time of a profiled cell
WEIGHT_SD = 0.4  # by which each log weight may differ from that of a profile, or of a context on the same hardware


def check_profile(profile: Profile, limits: Limits) -> None:
    """Raise ValueError naming what is beyond the limits."""
    for cell in profile.cells:
        for name, value, most in (
            ("batch_size", cell.batch_size, limits.max_batch_size),
            ("speculation_length", cell.speculation_length, limits.max_speculation_length),
        ):
            if value > most:
                raise ValueError(f"{name} {value} of the profile is beyond the context's limit of {most}")


def seed_times(context: Context, profile: Profile) -> None:
    """Take a profile's step times as a prior of limited weight."""
    cells = profile.cells
    columns = [
        (
            c.batch_size,
            c.speculation_length,
            c.batch_size,
            c.batch_size * (c.speculation_length + 1),
            c.mean_context_length,
        )
        for c in cells
    ]
    features = features_of(list(np.array(columns, dtype=float).T), context.grid.slopes)
    log_s = np.log([c.step_s for c in cells])
    information = (
        np.eye(len(cells)) - 1.0 / len(cells)
    ) / CELL_SD**2  # cells relative to their mean: the level is free
    solution = solve(information, information @ log_s, features, context.prior, context.prior.mean, RESIDUAL**2)
    loosened = solution.covariance + WEIGHT_SD**2 * np.eye(len(solution.phi))
    context.prior_mean, context.prior_precision = solution.phi, np.linalg.inv(loosened)
    theta = shares(features, solution.phi)[0] + solution.rho
    context.level = float((log_s - theta).mean())
    _seed_residuals(context, profile, solution.rho)


def _seed_residuals(context: Context, profile: Profile, rho: np.ndarray) -> None:
    """Spread residuals of profiled cells over batch sizes, by length, linearly in the logarithm of the size."""
    grid = context.grid
    sizes = grid.ranges.high
    batch = np.array([cell.batch_size for cell in profile.cells])
    length = np.array([cell.speculation_length for cell in profile.cells])
    offset = np.zeros((len(sizes), 2, grid.num_lengths))
    for each in np.unique(length):
        order = np.flatnonzero(length == each)[np.argsort(batch[length == each])]
        offset[:, :, each] = np.interp(np.log(sizes), np.log(batch[order]), rho[order])[:, None]
    context.offset = offset.reshape(-1)
    low, high = batch.min(), batch.max()
    context.profiled = (grid.ranges.high >= low) & (grid.ranges.low <= high)


def seed_from(context: Context, other: Context) -> None:
    """Start with the step times of a context on the same hardware."""
    estimates = other.groups[""].estimates
    if estimates is None or other.grid.slopes != context.grid.slopes:
        return
    solution = estimates.solution
    covariance = solution.covariance + WEIGHT_SD**2 * np.eye(len(solution.phi))
    context.prior_mean, context.prior_precision = solution.phi.copy(), np.linalg.inv(covariance)
    context.level = estimates.level
