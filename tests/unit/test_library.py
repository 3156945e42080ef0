"""The estimator as a library: the page's loop finds a good length of a simulated engine."""

import re
from pathlib import Path

import numpy as np

from tests.support.world import World

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "library.md"


def test_the_pages_loop_learns_a_good_length(monkeypatch):
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    world, rng, now = World(), np.random.default_rng(0), [0.0]

    def decode(batch: list, length: int) -> list[int]:
        seconds, histogram = world.draw(len(batch), length, rng)
        now[0] += seconds
        return [run for run, number in enumerate(histogram) for _ in range(number)]

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    names = {"decode": decode}
    exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102
    for _ in range(600):
        names["step"]([None] * 8)
    assert world.shortfall(8, names["estimator"].arm_for(8).speculation_length) < 0.03
