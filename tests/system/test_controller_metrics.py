"""The page tells what happened, under the documented names, and reading it changes nothing."""

import asyncio
import re
import threading

from speclen.controller.service.metrics import ControllerCollector, bucket_label
from tests.support.control_fakes import eventful_page, page_of, served


def value(text: str, name: str) -> float:
    found = re.search(rf"^speclen_controller_{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not on the page"
    return float(found.group(1))


async def test_counts_follow_what_happened(tmp_path):
    async with served(tmp_path) as at:
        text = await eventful_page(at)
        assert value(text, "reports_total") == 34
        assert value(text, "reports_repeated_total") == 1
        assert value(text, "reports_missing_total") == 4
        assert value(text, 'reports_refused_total{reason="latency_s"}') == 1
        assert value(text, 'call_errors_total{code="FAILED_PRECONDITION",method="ReportStep"}') == 1
        assert (value(text, "workers"), value(text, "contexts"), value(text, "streams")) == (1, 1, 1)
        assert value(text, "store_ok") == 1
        table = at.service.estimator.table(at.service.estimator.contexts[0])
        [choice] = [each for each in table.choices if each.batch_min <= 4 <= each.batch_max]
        bucket = bucket_label(choice.batch_min, choice.batch_max)
        labels = f'{{batch_bucket="{bucket}",context="t + d on cpu:test, float32"}}'
        assert value(text, f"speculation_length{labels}") == choice.arm.speculation_length
        assert value(text, f"predicted_ms_per_token{labels}") > 0
        assert value(text, "sample_every") == 1
        assert page_of(at.controller).count("\n") == text.count("\n")


async def test_numbers_are_read_where_they_change(tmp_path):
    """Reading them from the page's thread would meet collections that grow under its hands."""
    async with served(tmp_path) as at:
        running = at.controller
        collector = ControllerCollector(running.servicer, running.journal, asyncio.get_running_loop())
        read, threads = collector.read, []

        def noted():
            threads.append(threading.get_ident())
            return read()

        collector.read = noted
        found = await asyncio.to_thread(lambda: list(collector.collect()))
        assert threads == [threading.get_ident()]
        assert found
