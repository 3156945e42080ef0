"""Estimated step times agree with recorded ones: a run of the demo on two cores of an AMD EPYC.

Arms take turns there in blocks of seconds, so few steps follow one of another arm. tests/data/demo_steps.jsonl.gz has a
line for each step: batch size, draft tokens, n-grams or not, microseconds, tokens of context per sequence, drafted
sequences, verified tokens, flagged or not, sequences by accepted tokens, and evaluations where there are any.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from speclen.controller.estimator import Estimator
from speclen.records import PLAIN, Arm, Limits, OutputEvaluation, StepFlag, StepRecord

RECORDED = Path(__file__).parents[1] / "data" / "demo_steps.jsonl.gz"
GROUP, LEAST_STEPS = 32, 50


def recorded_steps() -> list[StepRecord]:
    """The steps, all in one class."""
    steps = []
    for seq, line in enumerate(gzip.decompress(RECORDED.read_bytes()).splitlines(), 1):
        batch, length, ngram, us, context, drafted, verified, flagged, histogram, *evaluations = json.loads(line)
        flags = frozenset({StepFlag.PREFILL} if flagged else ())
        record = StepRecord(seq, batch, Arm(length, bool(ngram)), us / 1e6, tuple(histogram), context, 0, flags)
        counts = {"num_drafted_sequences": drafted, "num_verified_tokens": verified}
        outputs = tuple(OutputEvaluation(*one) for each in evaluations for one in each)
        steps.append(record._replace(**counts, evaluations=outputs))
    return steps


def test_estimated_step_times_agree_with_recorded_ones() -> None:
    estimator, steps = Estimator(limits=Limits(32, 8, ngram=True)), recorded_steps()
    recorded: dict[tuple[int, Arm], list[float]] = defaultdict(list)
    for number in range(0, len(steps), GROUP):
        estimator.observe(steps[number : number + GROUP], "worker")
    for step in steps:
        if not step.flags:
            recorded[step.batch_size, step.arm].append(np.log(step.latency_s))
    believed = {(row.batch_min, row.arm): np.log(row.step_s) for row in estimator.rows()}
    of_plain, of_ratio = [], []
    for (batch_size, arm), log_s in recorded.items():
        plain = recorded.get((batch_size, PLAIN), [])
        if min(len(log_s), len(plain)) >= LEAST_STEPS:
            off_plain = believed[batch_size, PLAIN] - np.mean(plain)
            of_plain.append(off_plain)
            of_ratio.append(believed[batch_size, arm] - np.mean(log_s) - off_plain)
    assert len(of_ratio) >= 12
    assert np.abs(of_plain).max() < 0.15, "a size's own steps are not what is said of it"
    assert np.sqrt(np.mean(np.square(of_ratio))) < 0.15, "arms are compared wrongly"
    assert np.abs(of_ratio).max() < 0.25, "an arm is compared wrongly"
