"""An estimator's error resets its context alone; probes go to workers that follow; predictions meet observations."""

import pytest

from speclen.controller.service.journal import PredictedTimes
from speclen.controller.service.learner import MAX_SAMPLE_EVERY, PERIOD_S, PredictionError, Sampling
from speclen.records import Arm, Choice, StepFlag, StepRecord, Table
from tests.support.service_parts import ELSEWHERE, KEY, Parts


@pytest.fixture
def parts():
    return Parts()


def test_a_failing_estimator_resets_its_context_alone(parts):
    worker, elsewhere = parts.worker(), parts.worker("v", key=ELSEWHERE)
    parts.send(elsewhere, 1)
    parts.send(worker, 1)
    parts.estimators.fail = {"observe"}
    parts.send(worker, 2, 3)
    assert parts.totals.refused["estimator"] == 2
    assert parts.totals.drift["reset"] == 1
    assert not parts.estimators[KEY].rows()
    assert parts.estimators[ELSEWHERE].rows()
    parts.estimators.fail = {"observe", "reset"}
    parts.send(worker, 4)
    parts.estimators.fail = set()
    parts.send(worker, 5)
    assert worker.num_reports == 2
    assert worker.seqs.settled_seq == 5


def test_a_probe_goes_to_a_worker_that_follows_the_table_one_at_a_time(parts):
    parts.estimators.probes = True
    worker, fixed = parts.worker(), parts.worker("v", policy="fixed:2")
    for each in (worker, fixed):
        parts.send(each, 1)
        parts.send(each, 2)
    assert fixed.probe is None
    assert (worker.probe.batch_min, worker.probe.arm, worker.probe.num_steps) == (4, Arm(1), 3)
    assert parts.totals.num_probes == 1
    assert worker.take_probe_step(5) is None, "another batch size"
    assert [worker.take_probe_step(4).probe_id for _ in range(3)] == [1, 1, 1]
    assert worker.probe is None


def test_an_isolated_worker_has_a_table_of_its_own(parts):
    worker, other = parts.worker(), parts.worker("v")
    assert parts.learner.table_in_use(worker)[0] is parts.learner.table_in_use(other)[0]
    parts.estimators.isolated.add("v")
    assert [parts.learner.table_in_use(each)[1].own for each in (worker, other)] == ["", "v"]


def test_a_loop_that_is_too_busy_has_fewer_steps_reported_and_an_idle_one_all():
    now = [0.0]
    sampling = Sampling(lambda: now[0])

    def period(share: float) -> int:
        with sampling.measured():
            now[0] += share * PERIOD_S
        now[0] += (1.0 - share) * PERIOD_S
        sampling.judge()
        return sampling.sample_every

    assert [period(share) for share in (0.3, 0.6, 0.6, 0.3, 0.05, 0.05, 0.05)] == [1, 2, 4, 4, 2, 1, 1]
    assert max(period(0.9) for _ in range(20)) == MAX_SAMPLE_EVERY
    sampling.judge()
    assert sampling.sample_every == MAX_SAMPLE_EVERY, "a look within a period changes nothing"


TABLE = Table(1, (Choice(1, 2, Arm(3), 5.0), Choice(3, 4, Arm(2), 10.0)))


def step(batch: int, length: int, latency_s: float, *histogram: int, flagged: bool = False) -> StepRecord:
    flags = frozenset({StepFlag.PREFILL}) if flagged else frozenset()
    return StepRecord(1, batch, Arm(length), latency_s, histogram, flags=flags)


@pytest.mark.parametrize("histogram", [(1, 2, 1), (0, 2, 0)])
def test_the_prediction_error_is_observed_over_predicted(histogram):
    """2 tokens per sequence, of all four or of the two that show theirs: 20 ms were predicted, and 22 observed."""
    error = PredictionError()
    error.add(TABLE, [step(4, 2, 0.022, *histogram), step(4, 2, 9.0, *histogram, flagged=True)])
    [(sizes, times)] = error.times.items()
    assert (sizes, times) == ((3, 4), PredictedTimes(1, 2.0, 0.022, pytest.approx(0.020)))
    assert (error.elsewhere_s, error.regret_s) == (0.0, 0.0)
