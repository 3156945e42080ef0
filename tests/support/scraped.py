"""Real pages of a worker and of a controller that are in use."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from speclen.controller.service.metrics import ControllerCollector
from speclen.v1 import control_pb2 as pb
from tests.support.control_fakes import group, identity, registration, report, served, status_of
from tests.support.http_worker import MODEL, http_worker

Labels = dict[str, set[str]]


def labels_of(page: str) -> Labels:
    """Names of samples, each with the labels that it has, and the one that Prometheus adds."""
    found: Labels = defaultdict(lambda: {"instance"})
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return found


def scraped_worker() -> Labels:
    with http_worker(max_batch_size=4, check_models=False) as worker:
        worker.client().completions.create(
            model=MODEL, prompt=["The draft proposes", "The target"], max_tokens=40, extra_body={"ignore_eos": True}
        )
        worker.control.step_s = 0.3  # this worker's lengths are fixed, so nothing is reported to its control client
        worker.engine.target.pool.num_looked_up_tokens = 64  # what OpenVINO's pool counts
        return labels_of(httpx.get(f"{worker.url}/metrics").text)


def scraped_controller(tmp_path: Path) -> Labels:
    """With a worker that reports at the length in use and at another one, something implausible, and under an old name."""

    async def story() -> Labels:
        async with served(tmp_path) as at:
            await at.stub.RegisterWorker(registration())
            call = at.stub.StreamReports()
            await call.write(group(1, 30))
            await call.read()
            await at.service.learn_all()
            at.service.refresh()
            table = at.service.estimator.table(at.service.estimator.contexts[0])
            length = table.arm_for(4).speculation_length
            for seq, used in ((31, length), (32, length), (33, (length + 1) % 5)):
                histogram = [4] + [0] * used
                one = report(seq, speculation_length=used, accepted_histogram=histogram)
                await call.write(pb.StreamReportsRequest(reports=[one]))
                await call.read()
                await at.service.learn_all()
            await call.write(pb.StreamReportsRequest(reports=[report(34, latency_s=-1.0)]))
            await call.read()
            await status_of(at.stub.ReportStep(pb.ReportStepRequest(worker=identity(epoch=6), report=report(1))))
            registry = CollectorRegistry()
            registry.register(ControllerCollector(at.controller.servicer, at.controller.journal))
            return labels_of(generate_latest(registry).decode())

    return asyncio.run(asyncio.wait_for(story(), 90.0))
