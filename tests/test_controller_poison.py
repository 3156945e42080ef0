"""The law: whatever plausible reports say, in whatever order, and whatever the database holds, the controller goes on."""

from __future__ import annotations

import json
import math
from operator import attrgetter

import numpy as np
import pytest
from control_fakes import CONTEXT, identity, registration, report, run, served
from hypothesis import given, settings
from hypothesis import strategies as st

from speclen.controller.estimator.core import ContextKey, Limits, Profile, ProfileCell, StepObservation
from speclen.controller.estimator.estimator import Estimator
from speclen.store.connection import connect_reader, connect_writer
from speclen.v1 import control_pb2 as pb

KEY, NEIGHBOUR = ContextKey("t", "d", "cpu", "float32"), ContextKey("t", "d", "cuda", "float32")
LIMITS = Limits(32, 4)

EXTREME_S = st.sampled_from([1e-6, 1e-5, 1e-3, 0.02, 1.0, 3600.0]) | st.floats(1e-6, 3600.0)


@st.composite
def steps(draw) -> StepObservation:
    """A step as it passes validation, and as extreme as that allows."""
    batch_size, length = draw(st.sampled_from([1, 2, 4, 31, 32])), draw(st.integers(0, 4))
    cut = draw(st.integers(0, batch_size))
    histogram = [0] * (length + 1)
    histogram[0] += cut
    histogram[draw(st.integers(0, length))] += batch_size - cut
    context_length = draw(st.sampled_from([0.0, 100.0, 999_999_999.0]))
    teaches = draw(st.booleans())
    return StepObservation(
        batch_size, length, draw(EXTREME_S), tuple(histogram), context_length, teaches or draw(st.booleans()), teaches
    )


groups = st.lists(
    st.tuples(st.lists(steps(), min_size=1, max_size=12), st.sampled_from(["a", "b", "c"]), st.integers(1, 40)),
    max_size=12,
)


def check_sound(estimator: Estimator, key: ContextKey) -> None:
    """Everything that is told and stored of a context is a number within the database's rules."""
    for row in estimator.learned_rows(key):
        estimate = row.estimate
        assert 0.0 < estimate.step_s < 1e6
        assert 1.0 <= estimate.expected_tokens <= 65.0
        assert 0.0 <= estimate.ms_per_token_low <= estimate.ms_per_token_high < 1e12
    for choice in estimator.table(key).choices:
        assert choice.ms_per_token is None or 0.0 < choice.ms_per_token < 1e12
    json.dumps(estimator.export_state(key), allow_nan=False)
    json.dumps(estimator.export_pair_state(key.pair), allow_nan=False)


@settings(deadline=None, max_examples=60)
@given(groups)
def test_plausible_reports_in_any_order_are_survived(sent):
    estimator = Estimator()
    estimator.add_context(KEY, LIMITS)
    for observations, worker_id, repetitions in sent:
        for _ in range(repetitions):
            estimator.observe(KEY, observations, worker_id)
        estimator.take_probe(KEY)
        check_sound(estimator, KEY)
    again = Estimator()
    states = json.dumps(estimator.export_state(KEY)), json.dumps(estimator.export_pair_state(KEY.pair))
    again.restore(KEY, LIMITS, *map(json.loads, states))
    assert again.learned_rows(KEY) == estimator.learned_rows(KEY)


def test_what_a_model_says_that_starts_anew_is_not_kept_of_its_workers():
    """Story: in the report that took it out of what can be represented, a worker's level became no number, for ever."""
    long = 999_999_999.0
    quick = [StepObservation(1, 0, 1e-6, (1,), 0.0, True, False)] * 2 + [StepObservation(1, 2, 1e-6, (1, 0, 0))]
    slow = [StepObservation(4, 0, 1.0, (4,)), StepObservation(4, 2, 1e-6, (4, 0, 0), long)]
    wild = [
        StepObservation(31, 0, 1121.1464897868298, (31,), long),
        StepObservation(31, 1, 1e-6, (31, 0)),
        *[StepObservation(1, 0, 1e-6, (1,), 0.0, False, False)] * 4,
        StepObservation(1, 0, 1.0, (1,), long, True, False),
    ]
    last = [
        StepObservation(4, 0, 1.000001, (4,)),
        StepObservation(4, 0, 2454.830044932128, (4,)),
        StepObservation(32, 0, 1036.0, (32,)),
        StepObservation(32, 1, 1e-6, (32, 0), long, True, False),
    ]
    estimator = Estimator()
    estimator.add_context(KEY, LIMITS)
    estimator.observe(KEY, [StepObservation(1, 0, 1e-6, (1,), 0.0, False, False)], "b")
    for steps_sent, worker_id, repetitions in ((quick, "c", 16), (slow, "c", 9), (wild, "a", 3), (last, "a", 29)):
        for _ in range(repetitions):
            estimator.observe(KEY, steps_sent, worker_id)
        estimator.take_probe(KEY)
        check_sound(estimator, KEY)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 32), st.integers(0, 4), EXTREME_S), min_size=1, max_size=12), st.booleans())
def test_plausible_profiles_are_survived(cells, as_prior):
    estimator = Estimator()
    estimator.add_context(KEY, LIMITS)
    profile = Profile(tuple(ProfileCell(*cell) for cell in cells), (1.0, 1e-300, 0.0), (2**62,) * 3, as_prior)
    estimator.seed_profile(KEY, profile)
    estimator.observe(KEY, [StepObservation(4, 2, 0.02, (1, 2, 1))])
    check_sound(estimator, KEY)


@pytest.mark.parametrize("seed", range(3))
def test_two_workers_that_disagree_by_nine_orders_of_magnitude_are_survived(seed):
    """They once made `math.exp` overflow in the interval, which ended the process, and every one after it."""
    estimator, dice = Estimator(), np.random.default_rng(seed)
    estimator.add_context(KEY, LIMITS)
    for number in range(400):
        batch, length = int(dice.choice([1, 4, 32])), int(dice.integers(0, 5))
        seconds = 10.0 ** dice.uniform(-6, 3.5) if seed else (1e-6, 3600.0)[number % 2]
        observation = StepObservation(batch, length, seconds, (0,) * length + (batch,))
        estimator.observe(KEY, [observation], f"w{number % 2}")
        check_sound(estimator, KEY)


@pytest.mark.parametrize("damage", [math.nan, math.inf, -1e300, 1e300])
@pytest.mark.parametrize("where", ["surface.phi", "surface.covariance", "mean_log", "rho"])
def test_a_context_whose_numbers_leave_the_representable_starts_anew_alone(where, damage):
    estimator = Estimator()
    for key in (KEY, NEIGHBOUR):
        estimator.add_context(key, LIMITS)
        estimator.observe(key, [StepObservation(4, 2, 0.02, (1, 2, 1))] * 20)
    neighbour, survival = estimator.export_state(NEIGHBOUR), estimator.survival(KEY)
    version = estimator.table(KEY).version
    attrgetter(where)(estimator.context(KEY).main.times).flat[0] = damage
    outcome = estimator.observe(KEY, [StepObservation(4, 2, 0.02, (4, 0, 0), 0.0, True, False)])
    if not estimator.context(KEY).main.times.known:  # some damage is filtered out by the model itself
        assert [event.factor for event in outcome.drift_events] == ["reset"]
        assert estimator.table(KEY).version >= version
    check_sound(estimator, KEY)
    assert estimator.export_state(NEIGHBOUR) == neighbour
    assert estimator.survival(KEY) == pytest.approx(survival, rel=0.05)
    for _ in range(2):
        estimator.observe(KEY, [StepObservation(4, 2, 0.02, (1, 2, 1))] * 20)
    assert estimator.context(KEY).main.times.known, "and learns again"


def test_not_a_number_is_always_an_event():
    estimator = Estimator()
    estimator.add_context(KEY, LIMITS)
    estimator.observe(KEY, [StepObservation(4, 2, 0.02, (1, 2, 1))] * 20)
    estimator.context(KEY).main.times.surface.phi[:] = math.nan
    outcome = estimator.observe(KEY, [StepObservation(4, 2, 0.02, (1, 2, 1))])
    assert [event.factor for event in outcome.drift_events] == ["reset"]
    assert "starts anew" in outcome.drift_events[0].detail


def test_a_poisoned_context_is_served_and_stored_with_an_event(tmp_path):
    """Over real gRPC and a real database: the event is on record, the metric counts it, reports go on being durable."""

    async def story():
        async with served(tmp_path, commit_interval_s=0.05) as at:
            await at.stub.RegisterWorker(registration())
            for seq in range(1, 41):
                await at.stub.ReportStep(pb.ReportStepRequest(worker=identity(), report=report(seq)))
            at.service.estimator.context(next(iter(at.service.contexts))).main.times.surface.phi[:] = math.nan
            for seq in range(41, 61):
                await at.stub.ReportStep(pb.ReportStepRequest(worker=identity(), report=report(seq)))
            assert at.service.totals.drift["reset"] == 1
        connection = connect_reader(tmp_path / "test.db")
        assert connection.execute("SELECT count(*) FROM drift_events WHERE factor = 'reset'").fetchone()[0] == 1
        assert connection.execute("SELECT applied_seq FROM workers").fetchone()[0] == 60
        connection.close()

    run(story)


def test_two_plausible_workers_neither_stop_the_controller_nor_the_next_one(tmp_path):
    """Over real gRPC and a real database, with a restart in between: all is durable, and told in finite numbers."""

    async def life(first: int) -> None:
        dice = np.random.default_rng(first)
        async with served(tmp_path, commit_interval_s=0.02) as at:
            for worker_id in ("w", "v"):
                await at.stub.RegisterWorker(registration(worker_id))
            for seq in range(first, first + 150):
                for worker_id in ("w", "v"):
                    batch, length = int(dice.choice([1, 4, 32])), int(dice.integers(0, 5))
                    extreme = report(
                        seq,
                        batch_size=batch,
                        speculation_length=length,
                        latency_s=float(dice.choice([1e-6, 3600.0])),
                        accepted_histogram=[0] * length + [batch],
                    )
                    await at.stub.ReportStep(pb.ReportStepRequest(worker=identity(worker_id), report=extreme))
            rows = (await at.stub.GetLearnedTable(pb.GetLearnedTableRequest(context=CONTEXT))).tables[0].rows
            assert all(math.isfinite(row.ms_per_token_high) for row in rows)

    run(lambda: life(1))
    run(lambda: life(151))
    connection = connect_reader(tmp_path / "test.db")
    assert [tuple(row) for row in connection.execute("SELECT applied_seq, num_reports FROM workers")] == [
        (300, 300)
    ] * 2
    assert connection.execute("SELECT count(*) FROM store_events").fetchone()[0] == 0
    connection.close()


def test_a_probe_that_cannot_be_given_costs_the_context_and_not_the_call(tmp_path):
    async def story():
        async with served(tmp_path, commit_interval_s=0.05) as at:
            await at.stub.RegisterWorker(registration())
            for seq in range(1, 21):
                await at.stub.ReportStep(pb.ReportStepRequest(worker=identity(), report=report(seq)))
            choice = at.service.estimator.context(next(iter(at.service.contexts))).main.choice
            choice.probe = lambda *arguments: 1 / 0
            for seq in range(21, 31):
                await at.stub.ReportStep(pb.ReportStepRequest(worker=identity(), report=report(seq)))
            assert at.service.totals.drift["reset"] == 1

    run(story)


STATES = [
    ("context", "{}"),
    ("context", "[]"),
    ("context", "7"),
    ("pair", "{}"),
    ("pair", '"text"'),
]


def change_state(path, scope: str, change) -> None:
    connection = connect_writer(path)
    state = connection.execute("SELECT state FROM learned_states WHERE scope = ?", (scope,)).fetchone()[0]
    connection.execute("UPDATE learned_states SET state = ? WHERE scope = ?", (change(state), scope))
    connection.close()


def huge(state: str) -> str:
    """The numbers of a context, one of them beyond what a float holds."""
    parsed = json.loads(state)
    parsed["times"][0]["surface"]["phi"][0] = 10**400
    return json.dumps(parsed)


def overflowing(state: str) -> str:
    """As the defect left it: finite numbers from which only infinities follow."""
    parsed = json.loads(state)
    times = parsed["times"][0]
    times["surface"]["covariance"] = [[1e308] * 15 for _ in range(15)]
    times["rho"] = [1e3] * (32 * 5)
    return json.dumps(parsed)


def uncountable(state: str) -> str:
    """Rows without number."""
    parsed = json.loads(state)
    parsed["rows"] = np.full(np.shape(parsed["rows"]), np.inf).tolist()
    return json.dumps(parsed).replace("Infinity", "1e999")


def misshapen(state: str) -> str:
    parsed = json.loads(state)
    parsed["groups"][0][2]["lengths"] = parsed["groups"][0][2]["lengths"][:-1]
    return json.dumps(parsed)


@pytest.mark.parametrize(
    ("scope", "change"),
    [(scope, lambda state, text=text: text) for scope, text in STATES]
    + [("context", huge), ("context", overflowing), ("context", misshapen)]
    + [("pair", uncountable)],
)
def test_a_stored_state_that_cannot_be_used_is_set_aside(tmp_path, scope, change):
    async def life(first: int, last: int) -> None:
        async with served(tmp_path, commit_interval_s=0.05) as at:
            assert (await at.stub.RegisterWorker(registration())).durable_seq == first - 1
            for seq in range(first, last + 1):
                await at.stub.ReportStep(pb.ReportStepRequest(worker=identity(), report=report(seq)))
            rows = (await at.stub.GetLearnedTable(pb.GetLearnedTableRequest(context=CONTEXT))).tables[0].rows
            assert all(math.isfinite(row.ms_per_token_high) for row in rows)

    run(lambda: life(1, 30))
    damaged: list[str] = []
    change_state(tmp_path / "test.db", scope, lambda state: damaged.append(change(state)) or damaged[0])
    run(lambda: life(31, 60))
    connection = connect_reader(tmp_path / "test.db")
    found = connection.execute("SELECT kind, detail, content FROM store_events").fetchall()
    connection.close()
    assert [(row[0], row[2]) for row in found] == [("state_set_aside", damaged[0])]
    assert scope in found[0][1]
    run(lambda: life(61, 70))  # and the third start finds a sound state
    assert len(found) == 1


def test_marks_of_a_worker_that_are_no_numbers_are_set_aside(tmp_path):
    async def life(last: int) -> None:
        async with served(tmp_path, commit_interval_s=0.05) as at:
            await at.stub.RegisterWorker(registration())
            for seq in range(last - 9, last + 1):
                await at.stub.ReportStep(pb.ReportStepRequest(worker=identity(), report=report(seq)))

    run(lambda: life(10))
    connection = connect_writer(tmp_path / "test.db")
    connection.execute("""UPDATE workers SET missing_ranges = '{"1": 2}'""")
    connection.close()
    run(lambda: life(20))
    connection = connect_reader(tmp_path / "test.db")
    assert connection.execute("SELECT applied_seq, num_reports FROM workers").fetchone()[:] == (20, 20)
    assert connection.execute("SELECT count(*) FROM store_events").fetchone()[0] == 1
    connection.close()


def test_a_seq_near_the_end_of_what_the_database_holds_is_counted_once(tmp_path):
    """Two such gaps once made a sum that the database refused, while the worker was told that all was on disk."""

    async def life(epoch: int) -> None:
        async with served(tmp_path, commit_interval_s=0.05) as at:
            await at.stub.RegisterWorker(registration(epoch=epoch))
            for seq in (1, 2**63 - 2, 2**63 - 1):
                await at.stub.ReportStep(pb.ReportStepRequest(worker=identity(epoch=epoch), report=report(seq)))

    run(lambda: life(1))
    run(lambda: life(2))
    connection = connect_reader(tmp_path / "test.db")
    row = connection.execute("SELECT epoch, applied_seq, num_reports, num_missing FROM workers").fetchone()
    assert tuple(row) == (2, 2**63 - 1, 6, 2**63 - 1)
    assert connection.execute("SELECT count(*) FROM store_events").fetchone()[0] == 0
    connection.close()
