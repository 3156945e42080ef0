"""The law: who is in the step decides about its length, and who was there before does not."""

import asyncio

import numpy as np
import pytest
from control_fakes import CONTEXT, identity, registration, report, run, served, status_of

from speclen.v1 import control_pb2 as pb
from speclen.worker.engine.length_chooser import StepResult
from speclen.worker.engine.step_plan import StepPlan, rows_by_class
from speclen.worker.reporting.control_client import ControlClient, ControlSettings, WorkerCard
from speclen.worker.reporting.length_mix import LengthMix
from speclen.worker.reporting.length_table import LengthTable
from speclen.worker.requests.request import SamplingParams

QUICK = ControlSettings(flush_interval_s=0.02, heartbeat_s=0.05, retry_s=0.02)
ACCEPTANCE = (0.9, 0.6, 0.15)  # greedy, cool, hot


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [({}, 0), ({"temperature": 1.0, "top_k": 1}, 0), ({"temperature": 0.7}, 1), ({"temperature": 0.8}, 2)],
)
def test_the_class_follows_from_how_tokens_are_chosen(sampling, expected):
    assert SamplingParams(**sampling).request_class == expected


class Row:
    def __init__(self, request_class: int) -> None:
        self.request_class = request_class


def test_histograms_by_class_add_up():
    plan = StepPlan([Row(0), Row(2), Row(2), Row(0)], 4, [3] * 4, [], False)
    split = plan.class_histograms([3, 0, 1, 2])
    assert split == ((0, (0, 0, 1, 1)), (2, (1, 1, 0, 0)))
    assert tuple(map(sum, zip(*(runs for _, runs in split), strict=True))) == plan.histogram([3, 0, 1, 2])
    assert rows_by_class(plan.rows) == (2, 0, 2)
    assert StepPlan([Row(0), Row(0)], 2, [3] * 2, [], False).class_histograms([3, 1]) == (), (
        "as before classes were told"
    )


@pytest.mark.parametrize(
    ("histograms", "words"),
    [
        ([(1, [1, 2, 0])], "must add up"),
        ([(1, [1, 2, 1]), (1, [0, 0, 0])], "may be there once"),
        ([(4, [1, 2, 1])], "each of 1 to 3"),
        ([(0, [1, 2, 1])], "each of 1 to 3"),
        ([(1, [1, 2]), (2, [0, 0, 1])], "must add up"),
    ],
)
def test_histograms_by_class_that_are_not_plausible_are_refused(histograms, words):
    async def story():
        async with served(None) as at:
            await at.stub.RegisterWorker(registration())
            split = [pb.ClassHistogram(request_class=kind, accepted_histogram=runs) for kind, runs in histograms]
            bad = pb.ReportStepRequest(worker=identity(), report=report(1, class_histograms=split))
            code, details = await status_of(at.stub.ReportStep(bad))
            assert code == "INVALID_ARGUMENT"
            assert words in details

    run(story)


@pytest.mark.parametrize(
    "spoiled",
    [
        {"num_lengths": 3},
        {"step_s": [float("nan")] * 8},
        {"step_s": [0.0] * 8},
        {"tokens": []},
        # A plan of more than 64 draft tokens is none: every step failed that asked for one, and with it all requests.
        {"num_lengths": 66, "step_s": [0.1] * 132, "tokens": [1.0] * 396},
    ],
)
def test_a_mix_that_is_none_is_refused(spoiled):
    fields = {"bucket_ends": [1, 2], "num_lengths": 4, "step_s": [0.1] * 8, "tokens": [1.0] * 24} | spoiled
    with pytest.raises(ValueError, match=r"mix|reshape"):
        LengthMix.from_message(pb.LengthMix(**fields))


class SimulatedEngine:
    """Steps of made-up requests, chosen and reported as the engine does."""

    def __init__(self, control: ControlClient) -> None:
        self.control = control
        self.rng = np.random.default_rng(5)

    async def serve(self, rows: tuple[int, int, int], num_steps: int) -> list[int]:
        """Lengths played while so many greedy, cool and hot rows decode."""
        played = []
        for number in range(num_steps):
            choice = self.control.choice_for(sum(rows), False, rows)
            length = choice.speculation_length
            played.append(length)
            split = tuple((kind, self._histogram(count, kind, length)) for kind, count in enumerate(rows) if count)
            whole = tuple(map(sum, zip(*(runs for _, runs in split), strict=True)))
            taken = (0.010 + 0.001 * length + 0.0002 * sum(rows) * (length + 1)) * float(
                np.exp(0.05 * self.rng.standard_normal())
            )
            split = split if any(rows[1:]) else ()
            self.control.report(choice, StepResult(sum(rows), length, taken, whole, 100.0, class_histograms=split))
            if number % 8 == 7:
                await asyncio.sleep(0.03)
        return played

    def _histogram(self, count: int, kind: int, length: int) -> tuple[int, ...]:
        runs = np.minimum(self.rng.geometric(1.0 - ACCEPTANCE[kind], size=count) - 1, length)
        return tuple(np.bincount(runs, minlength=length + 1).tolist())


def goodput(length: int) -> float:
    """True tokens per second of a greedy row alone."""
    return sum(ACCEPTANCE[0] ** i for i in range(length + 1)) / (0.0102 + 0.0012 * length)


def test_three_hot_requests_do_not_change_the_length_of_the_greedy_one_after_them(tmp_path):
    """They once moved all sizes from 4-8 to 0-1 within 30 s, and the next greedy request took three times its steps."""

    async def story():
        async with served(tmp_path, commit_interval_s=0.1) as at:
            card = WorkerCard("w", 7, CONTEXT, 8, 6, "", "adaptive")
            control = ControlClient(card, LengthTable.constant(2, 8, "default"), True, QUICK)
            task = asyncio.create_task(control.run(at.address))
            while not control.connected:
                await asyncio.sleep(0.01)
            engine = SimulatedEngine(control)
            alone = (await engine.serve((1, 0, 0), 500))[-100:]
            hot = (await engine.serve((0, 0, 3), 500))[-100:]
            await asyncio.sleep(0.5)
            again = await engine.serve((1, 0, 0), 50)
            together = await engine.serve((1, 0, 3), 100)
            assert np.median(alone) >= 5
            assert np.median(hot) <= 1
            found, usual = (goodput(int(np.median(played))) for played in (again[:10], alone))
            assert found > 0.97 * usual, "found again at once"
            assert np.median(hot) <= np.median(together) <= np.median(alone)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(story)


def test_a_worker_that_tells_no_classes_is_served_as_before():
    """Neither sends what the other does not know."""

    async def story():
        async with served(None) as at:
            await at.stub.RegisterWorker(registration())
            for seq in range(1, 30):
                await at.stub.ReportStep(pb.ReportStepRequest(worker=identity(), report=report(seq)))
            table = (await at.stub.RegisterWorker(registration())).table
            assert not table.HasField("mix")
            assert len(table.choices) == 32

    run(story)
