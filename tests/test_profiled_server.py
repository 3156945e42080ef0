"""A simulated server keeps to the profile: with one row its latency is known, and no policy beats the true table by luck."""

from __future__ import annotations

import numpy as np
import pytest

from speclen.bench.simulation.profiled_server import (
    Policy,
    ProfiledMachine,
    Traffic,
    adaptive,
    fixed,
    from_table,
    make_traffic,
    serve,
)
from speclen.controller.estimator.core import Profile, ProfileCell, StepObservation

SURVIVAL = (0.7, 0.5, 0.38, 0.3)


def machine(slope: float = 0.0006) -> ProfiledMachine:
    """Speculation pays at small batches and hurts at 16: 10 ms, 0.4 ms a draft pass, and slope per row and token."""
    cells = tuple(
        ProfileCell(b, s, 0.010 + 0.0004 * s + slope * b * (s + 1) * (b > 2)) for b in (1, 4, 16) for s in range(5)
    )
    return ProfiledMachine(Profile(cells, SURVIVAL, (100,) * 4))


def test_step_times_between_profiled_batch_sizes_are_interpolated() -> None:
    times = machine().step_s
    assert times[10, 2] == pytest.approx((times[4, 2] + times[16, 2]) / 2)
    assert times[1, 0] == pytest.approx(0.010)


def test_a_cell_that_was_not_measured_is_not_taken_from_another_batch_size() -> None:
    """A hole at the largest batch size once made that length look as cheap as at the next smaller one, and win."""
    whole = machine()
    cells = [c for c in whole.profile.cells if (c.batch_size, c.speculation_length) != (16, 2)]
    holed = ProfiledMachine(Profile(tuple(cells), SURVIVAL, (100,) * 4)).step_s
    assert holed[16, 2] == pytest.approx((whole.step_s[16, 1] + whole.step_s[16, 3]) / 2)


def test_one_request_takes_its_steps_times_the_step_time() -> None:
    lonely = Traffic(np.array([1.0]), np.array([2000]))
    plain = serve(machine(), lonely, fixed(0))
    assert plain.num_steps == 2000
    assert plain.ms_per_token == pytest.approx(10.0, rel=0.02)
    # 2,000 tokens at 1 + 0.7 + 0.5 tokens a step of 10.8 ms; the runs' deviation is 1.7% of the mean.
    assert serve(machine(), lonely, fixed(2)).ms_per_token == pytest.approx(10.8 / 2.2, rel=0.06)


def test_batches_form_and_the_queue_is_served_in_order() -> None:
    together = Traffic(np.zeros(40), np.full(40, 50))
    outcome = serve(machine(), together, fixed(0))
    assert outcome.num_steps == 150  # 16 requests, 16, and the last 8, of 50 tokens each
    assert outcome.p95_ms_per_token > outcome.ms_per_token


def test_a_policy_is_told_what_a_worker_would_tell_it() -> None:
    """The tokens that requests asked for, none of those proposed beyond, and the rows that came while others decoded."""
    told: list[StepObservation] = []
    traffic = Traffic(np.array([0.0, 0.0, 0.05, 100.0]), np.array([30, 7, 11, 5]))
    serve(machine(), traffic, Policy(lambda batch_size: 4, told.append))
    assert sum(step.num_tokens for step in told) == 30 + 7 + 11 + 5
    assert [step.num_new_rows for step in told if step.num_new_rows] == [1]


def test_the_true_table_varies_with_the_batch_and_adaptation_comes_near_it() -> None:
    """Busy traffic around all batch sizes: the adaptive policy, which starts knowing nothing, stays within 10%."""
    world = machine()
    table = world.table()
    assert table[1] > table[16]
    rate = 0.75 * world.capacity_tokens_per_s() / 60
    traffic = make_traffic(rate, cv=2.0, num_requests=400, burst=1, mean_tokens=60, seed=0)
    best = serve(world, traffic, from_table(table)).ms_per_token
    learned = serve(world, traffic, adaptive(world)).ms_per_token
    seeded = serve(world, traffic, adaptive(world, seeded=True)).ms_per_token
    worst = serve(world, traffic, fixed(4)).ms_per_token
    assert best < worst
    assert learned < 1.1 * best
    assert seeded < 1.05 * best


def test_traffic_has_the_rate_the_variation_and_the_bursts_asked_for() -> None:
    """20,000 gaps of cv 2: the standard error of their mean is 1.4%, of their cv about 3%."""
    traffic = make_traffic(5.0, cv=2.0, num_requests=20_000, burst=1, mean_tokens=30, seed=1)
    gaps = np.diff(traffic.arrivals_s)
    assert gaps.mean() == pytest.approx(0.2, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.12)
    assert traffic.num_tokens.mean() == pytest.approx(30, rel=0.05)
    bursts = make_traffic(5.0, cv=1.0, num_requests=20_000, burst=10, mean_tokens=30, seed=1)
    assert len(np.unique(bursts.arrivals_s)) == 2000
    assert 20_000 / bursts.arrivals_s[-1] == pytest.approx(5.0, rel=0.1)


def test_a_profile_with_holes_is_refused() -> None:
    with pytest.raises(ValueError, match="every one from 0 on"):
        ProfiledMachine(Profile((ProfileCell(1, 1, 0.01), ProfileCell(1, 2, 0.01)), (0.5, 0.4), (1, 1)))
