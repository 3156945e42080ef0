"""A server made of a measured profile: how a policy fares under traffic, without waiting for the traffic.

Steps take what the profile measured, interpolated between batch sizes; every row of a step accepts a run drawn from the
profile's survival. Requests arrive with gamma distributed gaps, optionally in bursts, and batches form by themselves.
Every policy meets the same requests at the same times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from speclen.controller.estimator.core import ContextKey, Limits, Profile, StepObservation
from speclen.controller.estimator.estimator import Estimator

NOISE = 0.05  # log-normal deviation of the step times that the adaptive policy sees and that pass
KEY = ContextKey("target", "draft", "profile", "any")

Chooser = Callable[[int], int]  # batch size -> length


@dataclass(frozen=True, slots=True)
class Traffic:
    """arrivals_s: ascending. num_tokens: to generate, per request."""

    arrivals_s: np.ndarray
    num_tokens: np.ndarray


def make_traffic(rate_per_s: float, cv: float, num_requests: int, burst: int, mean_tokens: int, seed: int) -> Traffic:
    """Gamma gaps of coefficient of variation cv between bursts of `burst` requests, rate_per_s requests a second.

    Output lengths are geometric around mean_tokens, as where every token may be the last.
    """
    rng = np.random.default_rng(seed)
    num_bursts = -(-num_requests // burst)
    gaps = rng.gamma(1 / cv**2, cv**2 * burst / rate_per_s, num_bursts)
    arrivals = np.repeat(np.cumsum(gaps), burst)[:num_requests]
    return Traffic(arrivals, np.maximum(4, rng.geometric(1 / mean_tokens, num_requests)))


class ProfiledMachine:
    """Step times by batch size and length, and acceptance, from a profile. Raises ValueError if length 0 is missing."""

    def __init__(self, profile: Profile) -> None:
        self.lengths = sorted({cell.speculation_length for cell in profile.cells})
        self.sizes = sorted({cell.batch_size for cell in profile.cells})
        if self.lengths != list(range(self.lengths[-1] + 1)) or len(profile.survival) < self.lengths[-1]:
            raise ValueError(f"the profile has lengths {self.lengths}: a simulation needs every one from 0 on")
        longest = self.lengths[-1]
        self.profile = dataclasses.replace(
            profile, survival=profile.survival[:longest], num_survival_rows=profile.num_survival_rows[:longest]
        )
        self.max_batch_size, self.max_length = self.sizes[-1], self.lengths[-1]
        self.survival = np.array(profile.survival[: self.max_length])
        # First over lengths, so that a cell that is missing at one batch size is not taken from another.
        by_size = np.array([self._over_lengths(profile, size) for size in self.sizes])
        batch_sizes = np.arange(self.max_batch_size + 1)
        columns = [np.interp(batch_sizes, self.sizes, by_size[:, length]) for length in self.lengths]
        self.step_s = np.stack(columns, axis=1)

    def _over_lengths(self, profile: Profile, batch_size: int) -> np.ndarray:
        cells = sorted((c.speculation_length, c.step_s) for c in profile.cells if c.batch_size == batch_size)
        lengths, times = zip(*cells, strict=True)
        return np.interp(self.lengths, lengths, times)

    def expected_tokens(self) -> np.ndarray:
        """[max_length + 1]: tokens per row and step, bonus included."""
        return 1 + np.concatenate([[0.0], np.cumsum(self.survival)])

    def capacity_tokens_per_s(self) -> float:
        """Tokens per second with every row busy, at the best length."""
        return float(np.max(self.max_batch_size * self.expected_tokens() / self.step_s[self.max_batch_size]))

    def table(self) -> list[int]:
        """Best length by batch size, by the true means: what a perfect profile would say."""
        return [int(np.argmin(times / self.expected_tokens())) for times in self.step_s]


@dataclass(slots=True)
class ServedTraffic:
    """What one policy made of the traffic. Latency per token: from arrival to the last token, over the tokens."""

    ms_per_token: float
    p95_ms_per_token: float
    mean_batch_size: float
    num_steps: int


class Policy:
    """A length per batch size; `observe` is told of every step. Fixed lengths and tables ignore that."""

    def __init__(self, choose: Chooser, observe: Callable[[StepObservation], object] | None = None) -> None:
        self.choose = choose
        self.observe = observe


def fixed(length: int) -> Policy:
    return Policy(lambda batch_size: length)


def from_table(table: Sequence[int]) -> Policy:
    return Policy(lambda batch_size: table[batch_size])


def adaptive(machine: ProfiledMachine, seeded: bool = False) -> Policy:
    """Our controller with the probes that it asks for. It knows nothing at the start, or, seeded, the profile."""
    controller = Estimator()
    controller.add_context(KEY, Limits(machine.max_batch_size, machine.max_length))
    if seeded:
        controller.seed_profile(KEY, machine.profile)

    def choose(batch_size: int) -> int:
        probe = controller.take_probe(KEY, batch_size)
        if probe is not None and probe.bucket.batch_min <= batch_size <= probe.bucket.batch_max:
            return probe.speculation_length
        return controller.table(KEY).length_for(batch_size)

    return Policy(choose, lambda observation: controller.observe(KEY, [observation], "worker"))


def serve(machine: ProfiledMachine, traffic: Traffic, policy: Policy, seed: int = 0) -> ServedTraffic:
    """Serve all the traffic with continuous batching: rows join and leave between steps, first come first served."""
    rng = np.random.default_rng(seed)
    now, next_request, num_steps, busy_rows = 0.0, 0, 0, 0
    rows = np.zeros(0, dtype=int)  # requests that are running
    left = traffic.num_tokens.copy()
    finished_s = np.zeros(len(left))
    while next_request < len(left) or len(rows):
        if not len(rows):
            now = max(now, float(traffic.arrivals_s[next_request]))
        arrived = int(np.searchsorted(traffic.arrivals_s, now, side="right"))
        joining = min(arrived - next_request, machine.max_batch_size - len(rows))
        rows = np.concatenate([rows, np.arange(next_request, next_request + joining)])
        next_request += joining
        length = policy.choose(len(rows))
        latency = machine.step_s[len(rows), length] * float(np.exp(NOISE * rng.standard_normal()))
        runs = (rng.random(len(rows))[:, None] < machine.survival[None, :length]).sum(axis=1)
        runs = np.minimum(runs, left[rows] - 1)  # what is proposed beyond a request's last token is kept by nobody
        now += latency
        num_steps += 1
        busy_rows += len(rows)
        if policy.observe is not None:
            histogram = tuple(np.bincount(runs, minlength=length + 1).tolist())
            # As a worker tells it, new rows came while others decoded.
            num_new_rows = joining if joining < len(rows) else 0
            policy.observe(StepObservation(len(rows), length, latency, histogram, num_new_rows=num_new_rows))
        left[rows] -= runs + 1
        done = rows[left[rows] <= 0]
        finished_s[done] = now
        rows = rows[left[rows] > 0]
    per_token = 1e3 * (finished_s - traffic.arrivals_s) / traffic.num_tokens
    p95 = float(np.percentile(per_token, 95))
    return ServedTraffic(float(per_token.mean()), p95, busy_rows / num_steps, num_steps)
