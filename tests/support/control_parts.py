"""Parts of a worker's control client without a controller, and its metrics without an engine."""

from types import SimpleNamespace
from typing import Any

from speclen.records import PLAIN, Arm, Limits, StepRecord
from speclen.v1 import control_pb2 as pb
from speclen.worker.arms import ArmTable
from speclen.worker.engine.engine import EngineLoad
from speclen.worker.frontend.worker_metrics import WorkerMetrics
from speclen.worker.reporting.control_client import ControlClient
from speclen.worker.reporting.control_stream import ControlSettings
from speclen.worker.reporting.conversions import WorkerCard

LIMITS = Limits(8, 4, ngram=True)
QUICK = ControlSettings(flush_interval_s=0.005, heartbeat_s=0.05, silence_s=1.0, retry_s=0.02, max_retry_s=0.05)
FIRST = Arm(2)


def client(
    follow: bool = True, settings: ControlSettings = QUICK, limits: Limits = LIMITS, first: Arm = FIRST, **options
) -> ControlClient:
    """A client that is not connected. first: the arm of its first table."""
    card = WorkerCard("w", 1, pb.ContextKey(target="t", draft="d"), limits, "127.0.0.1:1", "adaptive")
    return ControlClient(card, ArmTable.constant(first, limits, "default"), follow, settings, **options)


def step(batch_size: int = 1, arm: Arm = FIRST, **fields) -> StepRecord:
    histogram = (batch_size,) + (0,) * arm.max_tokens
    return StepRecord(0, batch_size, arm, 0.01, histogram, 10.0, **fields)


def probe(batch_min: int = 1, batch_max: int = 8, num_steps: int = 1, arm: Arm = Arm(1), valid_for_s: float = 60.0):  # noqa: B008
    return pb.Probe(
        probe_id=9,
        batch_min=batch_min,
        batch_max=batch_max,
        speculation_length=arm.speculation_length,
        ngram=arm.ngram,
        num_steps=num_steps,
        valid_for_s=valid_for_s,
    )


def worker_metrics(engine: Any = None) -> WorkerMetrics:
    """Metrics of a worker with this engine, or one of fixed counts."""
    control = client(limits=Limits(4, 2, ngram=True), first=Arm(2, ngram=True))
    control.report(StepRecord(0, 3, Arm(2), 0.01, (1, 0, 2), 10.0))
    control.report(StepRecord(0, 3, PLAIN, 0.01, (3,), 10.0))
    load = EngineLoad(num_running=2, num_waiting=1, num_kv_tokens_used=50, num_kv_tokens_total=200, num_steps=7)
    load.num_looked_up_tokens, load.num_reused_tokens = 128, 96
    load.num_drafts, load.num_draft_tokens, load.num_ngram_tokens = 3, 6, 2
    load.num_accepted_tokens, load.num_accepted_by_position = 4, (2, 2)
    return WorkerMetrics(engine or SimpleNamespace(num_threads=3, load=lambda: load), control)
