"""The law: steps that are added up before they are sent count, teach and are kept as if each had been sent by itself."""

import asyncio
import math
import random
import time
from contextlib import closing
from dataclasses import replace

import pytest
from control_fakes import CONTEXT, LIMITS, identity, registration, report, run, served, until_durable
from hypothesis import given, settings
from hypothesis import strategies as st
from steps_of import KEY, Steps, controller_for

from speclen.controller.analysis.replay import ContextAdded, GroupObserved, replay
from speclen.controller.estimator.core import Bucket, ContextKey, Decision, Limits
from speclen.controller.estimator.reports import merged, typical
from speclen.controller.service.learning_service import URGENT_PAUSE_S, is_urgent, tell_all
from speclen.controller.service.registry import RegisteredContext
from speclen.controller.service.sequence import SeqWindow
from speclen.controller.service.thinning import (
    FRESH_S,
    LONGEST_S,
    MESSAGES_PER_S,
    ROTATION_S,
    SHORTEST_S,
    THICK_BELOW,
    THIN_ABOVE,
    Thinning,
    Windows,
)
from speclen.controller.wire.ingest import Group, Origin
from speclen.controller.wire.stored import observation_of
from speclen.controller.wire.sums import check_span, read_window
from speclen.controller.wire.validation import InvalidMessageError
from speclen.store import queries
from speclen.store.connection import connect_reader
from speclen.store.records import ReportRow
from speclen.v1 import control_pb2 as pb
from speclen.worker.engine.length_chooser import LengthChoice, StepFlag, StepResult
from speclen.worker.reporting.buffer import ReportBuffer
from speclen.worker.reporting.control_client import ControlClient, ControlSettings, WorkerCard
from speclen.worker.reporting.length_table import LengthTable
from speclen.worker.reporting.outgoing import Outgoing
from speclen.worker.reporting.partition import controller_of
from speclen.worker.reporting.window import to_window
from speclen.worker.service.server import flush_reports

ORIGIN = Origin(1, 1, 7, 11.0)
WIDE = Limits(LIMITS.max_batch_size, LIMITS.max_speculation_length)


def some_step(dice: random.Random, batch: int | None = None, length: int | None = None) -> StepResult:
    """A plausible step; one in ten stalls, one in five fed prompts along, and half tell classes apart."""
    batch = dice.randint(1, 4) if batch is None else batch
    length = dice.randint(0, 2) if length is None else length
    runs = [dice.randint(0, length) for _ in range(batch)]
    histogram = tuple(runs.count(run) for run in range(length + 1))
    seconds = 0.01 * (length + 1) * math.exp(0.05 * dice.gauss(0, 1)) * (20.0 if dice.random() < 0.1 else 1.0)
    flags = frozenset({StepFlag.PREFILL}) if dice.random() < 0.2 else frozenset()
    classes = ((dice.choice((0, 2)), histogram),) if dice.random() < 0.5 else ()
    return StepResult(batch, length, seconds, histogram, dice.uniform(10, 500), flags, None, classes)


def records(dice: random.Random, num: int, first: int = 1):
    return [
        (seq, LengthChoice(0, 1, probe_id=seq if dice.random() < 0.05 else 0), some_step(dice))
        for seq in range(first, first + num)
    ]


def read(window: pb.ReportWindow) -> Group:
    group = Group()
    check_span(window)
    assert read_window(window, WIDE, ORIGIN, group) == []
    return group


def checked(window: pb.ReportWindow, group: Group) -> None:
    check_span(window)
    read_window(window, WIDE, ORIGIN, group)


@settings(deadline=None)  # machines under load
@given(st.integers(0, 10_000), st.integers(1, 120))
def test_a_window_holds_every_step_once(seed, num):
    sent = records(random.Random(seed), num)
    window = to_window(sent)
    group = read(window)
    assert sum(each.num_steps for each in group.observations) == num
    for name, of_record in (
        ("rows", lambda result: result.batch_size),
        ("accepted", lambda result: sum(j * n for j, n in enumerate(result.accepted_histogram))),
    ):
        told = [
            sum(each.accepted_histogram)
            if name == "rows"
            else sum(j * n for j, n in enumerate(each.accepted_histogram))
            for each in group.observations
        ]
        assert sum(told) == sum(of_record(result) for _, _, result in sent)
    total_s = sum(each.latency_sum_s for each in window.sums) + sum(each.latency_s for each in window.reports)
    assert total_s == pytest.approx(sum(result.latency_s for _, _, result in sent))
    assert {each.probe_id for each in window.reports} - {0} == {choice.probe_id for _, choice, _ in sent} - {0}


@settings(deadline=None)  # machines under load
@given(st.integers(0, 10_000), st.integers(1, 60))
def test_what_is_kept_of_a_window_is_read_back_as_it_was_learned_from(seed, num):
    group = read(to_window(records(random.Random(seed), num)))
    stored = [observation_of(ReportRow(1, *row)) for row in group.rows]
    assert stored == group.observations


def test_what_was_read_is_told_once_for_the_whole_window():
    dice = random.Random(4)
    sent = [(seq, LengthChoice(2), some_step(dice, 4, 2)) for seq in range(1, 60)]
    for at, told in ((7, ((0, 90, 0), (3, 200, 150))), (30, ((3, 50, 40), (16, 210, 200))), (55, ((0, 256, 0),))):
        seq, choice, result = sent[at]
        sent[at] = (seq, choice, replace(result, read=told))
    window = to_window(sent)
    group = read(window)
    assert sum(each.num_steps for each in group.observations) == 59
    (told,) = [each.read for each in group.observations if each.read]
    assert told == ((0, 346, 0), (3, 250, 190), (16, 210, 200))
    assert max(each.num_steps for each in group.observations) > 20
    assert [observation_of(ReportRow(1, *row)) for row in group.rows] == group.observations


def test_a_stall_is_not_hidden_in_a_sum():
    dice = random.Random(1)
    sent = [(seq, LengthChoice(2), some_step(dice, 4, 2)) for seq in range(1, 40)]
    stall = StepResult(4, 2, 2.0, (1, 2, 1), 100.0)
    window = to_window([*sent, (40, LengthChoice(2), stall)])
    assert 40 in [each.seq for each in window.reports]
    usual = [each.latency_sum_s / each.num_steps for each in window.sums]
    assert max(usual) < 0.05


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: setattr(w, "last_seq", 41), "holds 40 steps; it must hold 41"),
        (lambda w: setattr(w, "first_seq", 0), "begin at 1"),
        (lambda w: setattr(w.sums[0], "num_steps", 2**31), "it must hold 40"),
        (lambda w: setattr(w.sums[0], "first_seq", 99), "seq of their own"),
        (lambda w: setattr(w.sums[0], "latency_sum_s", math.nan), "latency_sum_s is nan"),
        (lambda w: setattr(w.sums[0], "latency_sum_s", 1e9), "latency_sum_s is 1e+09"),
        (lambda w: setattr(w.sums[0], "latency_square_sum_s2", math.inf), "latency_square_sum_s2 is inf"),
        (lambda w: setattr(w.sums[0], "latency_square_sum_s2", 0.0), "latency_square_sum_s2 is 0"),
        (lambda w: w.sums[0].accepted_histogram.append(1), "accepted_histogram"),
        (lambda w: setattr(w.sums[0], "batch_size", 33), "batch_size is 33"),
        (lambda w: setattr(w.sums[0], "mean_context_length", -1.0), "mean_context_length is -1"),
        (
            lambda w: w.sums[0].class_histograms.append(pb.ClassHistogram(request_class=9, accepted_histogram=[1])),
            "class_histograms has classes",
        ),
    ],
)
def test_an_implausible_window_teaches_nothing(change, words):
    step = StepResult(4, 2, 0.02, (1, 2, 1), 100.0)
    window = to_window([(seq, LengthChoice(2), step) for seq in range(1, 41)])
    change(window)
    group = Group()
    with pytest.raises(InvalidMessageError, match=words.replace("+", r"\+")):
        checked(window, group)
    assert not group.rows
    assert not group.observations


@settings(deadline=None)  # machines under load
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), max_size=30))
def test_every_number_of_a_window_counts_once_or_all_are_refused(spans):
    window, seen = SeqWindow(), set()
    for first, more in spans:
        numbers = set(range(first, first + more + 1))
        new = window.admit_window(first, first + more)
        if new:
            assert not seen & numbers
            seen |= numbers
        else:
            assert seen & numbers or new is None
    assert window.num_missing == window.applied_seq - len(seen)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def spans_in(request: pb.StreamReportsRequest | None) -> list[tuple[str, int, int]]:
    if request is None:
        return []
    raw = [("raw", request.reports[0].seq, request.reports[-1].seq)] if request.reports else []
    return raw + [("window", each.first_seq, each.last_seq) for each in request.windows]


def drained(buffer: ReportBuffer, durable: int, clock: Clock, window_s: float) -> list[tuple[str, int, int]]:
    """All that a new stream sends, time passing."""
    outgoing, spans = Outgoing(buffer, durable, 16, clock), []
    while buffer.after(outgoing.sent_seq, 1):
        clock.now += 0.1
        spans += spans_in(outgoing.next(window_s))
    return spans


def test_what_is_sent_again_goes_as_it_went_before():
    """Otherwise the controller would have to take a part of a window, or count steps twice."""
    buffer, clock, dice = ReportBuffer(1000), Clock(), random.Random(3)

    def add(num: int) -> None:
        for _ in range(num):
            buffer.append(LengthChoice(0, 1), some_step(dice))

    add(20)
    assert drained(buffer, 0, clock, 0.0) == [("raw", 1, 16), ("raw", 17, 20)]
    add(30)
    assert drained(buffer, 20, clock, 0.5) == [("window", 21, 50)]
    add(5)
    assert drained(buffer, 50, clock, 0.0) == [("raw", 51, 55)]
    add(5)
    assert drained(buffer, 55, clock, 0.5) == [("window", 56, 60)]
    everything = [("raw", 1, 16), ("raw", 17, 20), ("window", 21, 50), ("raw", 51, 55), ("window", 56, 60)]
    assert drained(buffer, 0, clock, 0.5) == everything
    assert drained(buffer, 0, clock, 0.0) == everything
    buffer.forget_until(50)
    assert drained(buffer, 50, clock, 0.5) == everything[3:]
    assert list(buffer.sealed) == [(56, 60)]


def test_windows_of_reports_that_were_dropped_are_forgotten():
    buffer, clock, dice = ReportBuffer(100), Clock(), random.Random(5)
    outgoing = Outgoing(buffer, 0, 16, clock)
    for _ in range(1000):
        buffer.append(LengthChoice(0), some_step(dice))
        clock.now += 1.0
        outgoing.next(0.5)
        buffer.trim()
    assert len(buffer.sealed) == len(buffer) == 100


def test_a_window_waits_for_its_time_and_no_longer():
    buffer, clock, dice = ReportBuffer(10_000), Clock(), random.Random(4)
    outgoing = Outgoing(buffer, 0, 16, clock)
    buffer.append(LengthChoice(0), some_step(dice))
    clock.now = 0.49
    assert outgoing.next(0.5) is None
    assert 0.0 < outgoing.pause_s(0.5, 0.2) <= 0.2
    clock.now = 0.51
    assert spans_in(outgoing.next(0.5)) == [("window", 1, 1)]
    for _ in range(2000):  # more than a message holds: not waited for
        buffer.append(LengthChoice(0), some_step(dice))
    assert spans_in(outgoing.next(0.5)) == [("window", 2, 1025)]
    assert outgoing.more


def windows_of(first: int, num: int) -> pb.StreamReportsRequest:
    step = StepResult(4, 2, 0.02, (1, 2, 1), 100.0)
    sent = [(seq, LengthChoice(2), step) for seq in range(first, first + num)]
    return pb.StreamReportsRequest(worker=identity(), windows=[to_window(sent)])


def test_a_controller_counts_windows_as_their_steps_and_replays_them(tmp_path):
    async def story():
        async with served(tmp_path, commit_interval_s=0.05) as at:
            await at.stub.RegisterWorker(registration())
            call = at.stub.StreamReports()
            await call.write(pb.StreamReportsRequest(worker=identity(), reports=[report(1), report(2)]))
            await call.write(windows_of(3, 40))
            await call.write(windows_of(3, 40))  # again: a repetition
            await call.write(windows_of(43, 8))
            await until_durable(call, 50)
            await call.write(windows_of(45, 20))  # a part was seen: refused
            answer = await call.read()
            while answer.num_refused == 0:
                answer = await call.read()
            assert (answer.num_refused, "begins before 51" in answer.last_refusal) == (1, True)
            worker, totals = at.service.registry.workers["w"], at.service.totals
            assert (worker.num_reports, worker.num_refused, totals.num_reports, totals.num_repeated) == (50, 20, 50, 40)
            table = await at.stub.GetLearnedTable(pb.GetLearnedTableRequest())
            assert sum(row.num_steps for row in table.tables[0].rows) == 50

    run(story)
    connection = connect_reader(tmp_path / "test.db")
    rows = list(queries.stored_reports(connection))
    minutes = connection.execute("SELECT sum(num_steps) FROM prediction_windows").fetchone()[0]
    connection.close()
    assert [(row.seq, row.num_steps) for row in rows] == [(1, 1), (2, 1), (3, 40), (43, 8)]
    assert minutes is None or minutes <= 50
    events = [ContextAdded(ContextKey("t", "d", "cpu:test", "float32"), WIDE)]
    events += [GroupObserved(row.group_id, events[0].key, ["w"], [observation_of(row)]) for row in rows]
    assert replay(events).num_reports == 50


def test_a_worker_that_is_asked_for_windows_loses_no_step(tmp_path):
    async def story():
        async with served(tmp_path, commit_interval_s=0.05) as at:
            thinning = at.service.thinning
            thinning.judge = lambda *load: None  # whatever the load
            card = WorkerCard("w", 7, CONTEXT, 32, 4, "127.0.0.1:1", "adaptive")
            quick = ControlSettings(flush_interval_s=0.01, heartbeat_s=0.05)
            client, dice = ControlClient(card, LengthTable.constant(2, 32, "default"), True, quick), random.Random(8)

            async def steps(num: int) -> None:
                last = client.buffer.next_seq.__self__  # an itertools.count: its repr says what comes next
                for _ in range(num):
                    client.report(LengthChoice(2), some_step(dice, 4, 2))
                while client.buffer:
                    await asyncio.sleep(0.01)
                assert repr(last) == f"count({at.service.registry.workers['w'].num_reports + 1})"

            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(client.run(at.address))
                await steps(30)
                thinning.windows = Windows(0.1)
                while client.window_s != 0.1:
                    await asyncio.sleep(0.01)
                await steps(100)
                thinning.windows = Windows()
                while client.window_s:
                    await asyncio.sleep(0.01)
                await steps(30)
                running.cancel()

    run(story)
    connection = connect_reader(tmp_path / "test.db")
    kept = [row.num_steps for row in queries.stored_reports(connection)]
    connection.close()
    assert sum(kept) == 160
    assert kept[:30] == [1] * 30
    assert len(kept) < 120


def test_a_worker_that_ends_hands_its_last_window_over_at_once(tmp_path):
    """It waited for the window's end, and the worker was gone before."""

    async def story():
        async with served(tmp_path, commit_interval_s=0.05) as at:
            thinning = at.service.thinning
            thinning.judge = lambda *load: None  # whatever the load
            thinning.windows = Windows(30.0)
            card = WorkerCard("w", 7, CONTEXT, 32, 4, "127.0.0.1:1", "adaptive")
            client, dice = ControlClient(card, LengthTable.constant(2, 32, "default"), True), random.Random(8)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(client.run(at.address))
                while client.window_s != 30.0:
                    await asyncio.sleep(0.01)
                for _ in range(40):
                    client.report(LengthChoice(2), some_step(dice, 4, 2))
                await asyncio.sleep(1.0)
                assert len(client.buffer) == 40
                await flush_reports(client)
                assert not client.buffer
                assert at.service.registry.workers["w"].num_reports == 40
                running.cancel()

    run(story)


def test_a_worker_is_asked_for_windows_only_where_a_core_would_not_keep_up():
    thinning, few, many = Thinning(), int(0.26 * MESSAGES_PER_S), int(2.0 * MESSAGES_PER_S)
    assert thinning.message(True) is None

    def second(at: int, steps: float, workers: int) -> Windows:
        thinning.count(int(steps))
        thinning.judge(float(at), workers)
        return thinning.windows

    assert [second(at, 0.9 * THIN_ABOVE, 400) for at in range(10)][-1] == Windows()
    assert [second(at, 5 * THIN_ABOVE, few) for at in range(10, 20)][-1] == Windows(0.26)
    assert thinning.message(True).window_s == 0.26
    assert second(20, 5 * THIN_ABOVE, int(1.1 * few)) == Windows(0.26)  # a few more are no news
    large = second(21, 5 * THIN_ABOVE, many)
    assert large.window_s == pytest.approx(FRESH_S, abs=2e-3)
    assert (thinning.message(True).window_s, thinning.message(False).window_s) == (large.window_s, large.rest_s)
    assert [second(at, 0.9 * THICK_BELOW, many) for at in range(22, 60)][-1] == Windows()


@pytest.mark.parametrize("num_apart", [0, 128, 1000])
@pytest.mark.parametrize("num_workers", [100, 300, 600, 1200, 2500, 5000])
def test_the_windows_of_a_fleet_are_no_more_messages_than_a_core_takes(num_workers, num_apart):
    num_apart = min(num_apart, num_workers)
    windows = Windows.of_fleet(num_workers, num_apart)
    fresh = num_apart + windows.share * (num_workers - num_apart)
    messages = fresh / windows.window_s + (num_workers - fresh) / (windows.rest_s or 1.0)
    assert messages < 1.02 * MESSAGES_PER_S
    assert SHORTEST_S <= windows.window_s <= LONGEST_S
    if num_workers > 1000 and num_apart < 200:
        assert windows.window_s < 1.1 * FRESH_S, "decisions do not age with the fleet"
        assert fresh * 40 > 3000, "steps a second to learn from"


def test_who_is_learned_from_is_a_random_share_that_changes_with_time():
    windows, names = Windows(0.4, 5.0, 0.2), [f"worker-{number}" for number in range(5000)]

    def chosen(now: float) -> set[str]:
        return {name for name in names if windows.learns_from(name, False, now)}

    first, soon, later = chosen(1e6), chosen(1e6 + 1.0), chosen(1e6 + 2 * ROTATION_S)
    # 1,000 of 5,000 expected with a standard deviation of 28: one seed, and so either always right or always wrong.
    assert all(850 < len(each) < 1150 for each in (first, soon, later))
    assert len(first ^ soon) < 100
    assert len(first & later) < 400
    assert windows.learns_from("worker-1", True, 0.0), "who is told apart is always learned from"
    assert all(Windows(0.4).learns_from(name, False, 0.0) for name in names[:10])


async def beat_until_durable(call, seq: int) -> None:
    """As a worker does that has nothing to report: who adds up is not told of the disk but in answers."""
    while True:
        await call.write(pb.StreamReportsRequest())
        if (await call.read()).durable_seq >= seq:
            return
        await asyncio.sleep(0.02)


def test_who_adds_up_is_told_at_once_of_what_is_urgent_alone(tmp_path):
    async def story():
        async with served(tmp_path, commit_interval_s=0.05) as at:
            thinning, worker_of = at.service.thinning, at.service.registry.workers
            thinning.judge = lambda *load: None
            thinning.windows = Windows(5.0)
            await at.stub.RegisterWorker(registration())
            call = at.stub.StreamReports()
            await call.write(windows_of(1, 20))
            assert (await call.read()).thinning.window_s == 5.0
            heard = asyncio.ensure_future(call.read())
            while worker_of["w"].durable_seq < 20:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            assert not heard.done(), "that it is on disk can wait for the next window"
            tell_all(worker_of["w"].context, time.monotonic())
            at.service.news.note(["w"])
            assert (await heard).durable_seq == 20

    run(story)


def test_all_are_told_again_only_after_a_pause():
    context = RegisteredContext(1, ContextKey("t", "d", "cpu", "float32"), WIDE, 0.0)
    for now, when in ((100.0, 100.0), (100.1, 100.0 + URGENT_PAUSE_S), (100.2, 100.0 + URGENT_PAUSE_S), (200.0, 200.0)):
        tell_all(context, now)
        assert context.urgent_at == when


@pytest.mark.parametrize(("before", "now", "urgent"), [(None, 1.0, True), (1.04, 1.0, False), (1.06, 1.0, True)])
def test_a_large_gain_is_urgent(before, now, urgent):
    bucket = Bucket(0, 1, 1)
    decision = Decision(ContextKey("t", "d", "cpu", "float32"), bucket, 2, 3, 4, before, now, "a reason")
    assert is_urgent(decision) is urgent


def test_a_long_window_of_a_large_fleet_is_counted_alone(tmp_path):
    async def story():
        async with served(tmp_path, commit_interval_s=0.05) as at:
            thinning = at.service.thinning
            thinning.judge = lambda *load: None
            at.service._is_told_apart = lambda worker: False
            thinning.windows = Windows(0.4, 5.0, 1.0)
            await at.stub.RegisterWorker(registration())
            call = at.stub.StreamReports()
            await call.write(windows_of(1, 20))
            await beat_until_durable(call, 20)
            thinning.windows = Windows(0.4, 5.0, 0.0)
            await call.write(windows_of(21, 20))  # begun before the worker was told
            await beat_until_durable(call, 40)
            await call.write(windows_of(41, 200))
            await beat_until_durable(call, 240)
            totals, worker = at.service.totals, at.service.registry.workers["w"]
            assert (totals.num_reports, totals.num_thinned, worker.num_reports) == (40, 200, 240)

    run(story)
    with closing(connect_reader(tmp_path / "test.db")) as connection:
        assert sum(row.num_steps for row in queries.stored_reports(connection)) == 40
        assert [row.num_reports for row in queries.workers(connection)] == [240]


def test_a_sum_teaches_what_its_steps_teach():
    """Fed step by step and added up by tens: the same counts, and the same step times and acceptance within a percent."""
    single, summed, steps = controller_for(), controller_for(), Steps(5)
    for _ in range(60):
        group = [steps.step(8, length) for length in (1, 3, 5) for _ in range(10)]
        single.observe(KEY, group, "w")
        summed.observe(KEY, merged(group), "w")
    for one, other in zip(single.learned_rows(KEY), summed.learned_rows(KEY), strict=True):
        assert one.num_steps == other.num_steps
        if one.num_steps:
            assert other.estimate.step_s == pytest.approx(one.estimate.step_s, rel=0.01)
            assert other.estimate.expected_tokens == pytest.approx(one.estimate.expected_tokens, rel=0.02)
    assert [c.speculation_length for c in single.table(KEY).choices][7] == summed.table(KEY).choices[
        7
    ].speculation_length


def test_a_fleet_that_is_too_large_to_tell_apart_is_learned_from_as_one():
    """Two hundred workers, 3% of whom lie, cost no more calls than one, and the lies move nothing."""
    estimator, steps = controller_for(), Steps(6)
    for at in range(40):
        group, senders = [], []
        for worker in range(200):
            step = steps.step(8, 2 + at % 2)
            lies = worker >= 194
            group.append(step._replace(latency_s=10.0 * step.latency_s) if lies else step)
            senders.append(f"worker-{worker}")
        estimator.observe(KEY, group, senders)
    row = next(row for row in estimator.learned_rows(KEY) if row.bucket.batch_min == 8 and row.num_steps)
    assert row.num_steps == 20 * 200
    assert row.estimate.step_s == pytest.approx(steps.time(8, row.estimate.speculation_length), rel=0.05)
    assert not estimator.tells_apart(KEY, "worker-199")
    assert estimator.tells_apart(KEY, "worker-3")


def test_a_typical_step_keeps_the_shares_of_a_sum():
    total = merged([Steps(7).step(8, 3) for _ in range(10)])[0]
    one = typical(total)
    assert (one.num_steps, sum(one.accepted_histogram)) == (1, 8)
    assert one.accepted_histogram == pytest.approx([n / 10 for n in total.accepted_histogram], abs=1.0)


def test_workers_of_a_pair_and_device_report_to_one_of_several_controllers():
    """Everybody finds the same one by itself, and one more controller moves only what goes to it."""
    few = [f"controller-{at}:7070" for at in range(4)]
    contexts = [pb.ContextKey(target="t", draft="d", device=f"device {at}") for at in range(200)]

    def places(addresses: list[str], by: str = "context", worker: str = "w") -> list[str]:
        return [controller_of(",".join(addresses), by, context, worker) for context in contexts]

    assert places(few) == places(few[::-1]) == places(few, worker="another")
    assert set(places(few)) == set(few)
    more = places([*few, "controller-4:7070"])
    moved = [new for old, new in zip(places(few), more, strict=True) if new != old]
    assert set(moved) == {"controller-4:7070"}
    by_name = {controller_of(",".join(few), "worker", contexts[0], f"worker-{at}") for at in range(100)}
    assert by_name == set(few)
    assert controller_of("", "context", contexts[0], "w") == ""
