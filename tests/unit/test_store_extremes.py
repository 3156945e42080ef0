"""The database accepts every row that valid reports lead to, on each supported SQLite."""

import random
from pathlib import Path

import pytest

from speclen import store
from speclen.controller.estimator import Estimators
from speclen.controller.wire.messages import MAX_INTEGER, MAX_LATENCY_S, MAX_TOKENS, MIN_LATENCY_S
from speclen.records import Arm, Limits
from speclen.store.retention import KEEP_REPORTS
from speclen.store.transaction import write
from speclen.v1 import control_pb2 as pb
from tests.support.service_parts import Parts
from tests.support.store_rows import moment, report

LIMITS = Limits(64, 3, True)


@pytest.fixture(params=["pysqlite3.dbapi2", "sqlite3"])
def connection(request):
    """An empty database of the library that Linux has, or of the one that Python brings: 3.40 on Debian 12."""
    library = pytest.importorskip(request.param)
    connection = library.connect(":memory:", isolation_level=None)
    connection.executescript((Path(store.__path__[0]) / "schema.sql").read_text("utf-8"))
    yield connection
    connection.close()


def refused(connection, commit, number: int = 1) -> list[str]:
    """Reasons why rows of a commit were refused, and problems of the database afterwards."""
    outcome = write(connection, [commit], KEEP_REPORTS, number, 1e9)
    problems = [row[0] for row in connection.execute("PRAGMA integrity_check")]
    return [*outcome.refusals, *(problem for problem in problems if problem != "ok")]


def test_absent_values_and_largest_numbers_are_taken(connection):
    largest = {"seq": MAX_INTEGER, "decision_version": MAX_INTEGER, "probe_id": MAX_INTEGER, "num_new_sequences": 4096}
    reports = [report(1), report(2, evaluations="[]", class_histograms="{}"), report(**largest)]
    assert refused(connection, moment([1], reports=reports)) == []


def extreme(rng: random.Random, seq: int, latencies: tuple[float, ...]) -> pb.StepReport:
    """A report whose numbers are all at one of their bounds."""
    arm, num_sequences = Arm(rng.choice((0, 0, 1, 3)), rng.random() < 0.3), rng.choice((1, 64))
    histograms = [[0] * (arm.max_tokens + 1) for _ in range(2)]
    for _ in range(num_sequences):
        rng.choice(histograms)[rng.choice((0, arm.max_tokens))] += 1
    step = pb.StepReport(
        seq=seq,
        batch_size=num_sequences,
        speculation_length=arm.speculation_length,
        ngram=arm.ngram,
        latency_s=rng.choice(latencies),
        accepted_histogram=map(sum, zip(*histograms, strict=True)),
        mean_context_length=rng.choice((0, MAX_TOKENS)),
        draft_prefill_s=rng.choice((0.0, MAX_LATENCY_S)),
        num_new_sequences=rng.choice((0, LIMITS.max_batch_size)),
        class_histograms=[
            pb.ClassHistogram(request_class=k, accepted_histogram=h) for k, h in zip((1, 3), histograms, strict=True)
        ],
    )
    if rng.random() < 0.1:
        tokens = rng.choice((1, MAX_TOKENS))
        most = [each.max_tokens + 1 for each in LIMITS.arms()]
        steps = [rng.choice((tokens, -(-tokens // each))) for each in most]
        verified = [rng.choice((taken, min(taken * each, 2**32 - 1))) for taken, each in zip(steps, most, strict=True)]
        step.evaluations.add(
            request_class=rng.randint(1, 3),
            num_output_tokens=MAX_TOKENS,
            num_tokens=tokens,
            num_steps=steps,
            num_drafted_steps=[rng.choice((0, each)) for each in steps],
            num_verified_tokens=verified,
        )
    return step


@pytest.mark.parametrize("latencies", [(MIN_LATENCY_S, MAX_LATENCY_S, 0.02), (MIN_LATENCY_S,)])
async def test_what_is_learned_from_extreme_reports_is_taken(connection, latencies):
    rng, parts = random.Random(0), Parts(estimators=Estimators(), limits=LIMITS)
    workers = [parts.worker(f"w{number}") for number in range(2)]
    for number in range(1, 11):
        for worker in workers:
            first = worker.seqs.applied_seq + 1
            assert parts.learner.take(worker, [extreme(rng, first + at, latencies) for at in range(16)]) == []
            parts.learner.learn(worker)
        parts.journal.commit()
        assert refused(connection, parts.store.last, number) == []
        await parts.store.land(number - 1)
    assert not parts.totals.refused, "the estimator failed"
