"""Requests that are done leave nothing behind."""

import gc
import random
import sys

import pytest

from speclen.worker.requests.request import SequenceOutput
from tests.support import engines
from tests.support.waiting import resident_bytes


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_stays_flat_over_many_requests():
    """After a warm-up in which products of all sizes get their kernels. Each of 600 requests holds 30 KB of KV at its end.

    One of three times must be flat: other tests of this process also take memory, once.
    """
    engine = engines.make_engine(chooser=engines.RandomLengths(0, longest=3), max_batch_size=8)
    generator = random.Random(0)
    finished = 0

    def tell(output: SequenceOutput) -> None:
        nonlocal finished
        finished += output.finish_reason is not None

    def serve(start: int, count: int) -> None:
        for at in range(start, start + count):
            sampling = {"temperature": generator.choice([0.0, 1.0]), "presence_penalty": generator.choice([0.0, 0.5])}
            one = engines.request(
                str(at), engines.random_prompt(generator), max_tokens=generator.randint(1, 6), **sampling
            )
            engine.submit(one, tell)
            if at % 50 == 0:
                engines.finish(engine)
        engines.finish(engine)
        gc.collect()

    serve(0, 2700)
    growth = []
    for start in range(2700, 4500, 600):
        before = resident_bytes()
        serve(start, 600)
        growth.append(resident_bytes() - before)
        if growth[-1] < 4 * 2**20:
            break
    assert finished == start + 600
    assert min(growth) < 4 * 2**20, growth
    assert engine.target.pool.num_bytes_held() == 0
