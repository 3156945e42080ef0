"""An offline profile as evidence of limited weight: what was measured online overrules it."""

from __future__ import annotations

import numpy as np

from speclen.controller.estimator import settings
from speclen.controller.estimator.features import features_of, shares
from speclen.controller.estimator.sizes import Cells, Grid
from speclen.controller.estimator.step_time import Evidence, solve
from speclen.records import Limits, Profile


def check_profile(profile: Profile, limits: Limits) -> None:
    """Raise ValueError naming what is beyond the limits."""
    for cell in profile.cells:
        for name, value, most in (
            ("batch_size", cell.batch_size, limits.max_batch_size),
            ("speculation_length", cell.speculation_length, limits.max_speculation_length),
        ):
            if value > most:
                raise ValueError(f"{name} {value} of the profile is beyond the context's limit of {most}")


def evidence_of(profile: Profile, grid: Grid, cells: Cells) -> tuple[Evidence, float]:
    """Contrasts of each profiled cell with the mean of all, and the level. Adds the profile's cells."""
    columns = [
        (c.batch_size, c.speculation_length, c.batch_size * (c.speculation_length + 1), c.mean_context_length, c.step_s)
        for c in profile.cells
    ]
    batch, length, verified, context, step_s = np.array(columns, dtype=float).T
    features = features_of(batch, length, batch, verified, context)
    places = cells.places(grid.cells_at(batch.astype(int), length.astype(int)), features)
    one_hot = (places[:, None] == np.arange(len(cells.numbers))).astype(float)
    contrasts = (one_hot - one_hot.mean(axis=0)) / settings.current.cell_sd
    log_s = np.log(step_s)
    evidence = Evidence()
    evidence.grow(len(cells.numbers))
    evidence.information, evidence.moment = contrasts.T @ contrasts, contrasts.T @ (log_s / settings.current.cell_sd)
    solution = solve(evidence.information, evidence.moment, cells.features)
    theta = shares(cells.features, solution.phi)[0] + solution.rho
    return evidence, float((log_s - theta[places]).mean())
