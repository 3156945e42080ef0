"""Steps that were alike, added up: what a controller of many workers is told instead of every single one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median_low

from speclen.v1 import control_pb2 as pb
from speclen.worker.drafting.copying import Reading
from speclen.worker.engine.length_chooser import StepFlag
from speclen.worker.reporting.buffer import Record
from speclen.worker.reporting.messages import CLASSES, FLAGS, to_report

# A step that took so many times the median of those like it, or so little, stays by itself: a sum would hide the stall.
FAR = 2.0
# What a step with one of these says is lost in a sum.
ALONE = frozenset({StepFlag.CATCH_UP, StepFlag.COPIED})


def to_window(records: Sequence[Record]) -> pb.ReportWindow:
    """Records of consecutive steps, at least one, as one message. Raises ValueError for one that no message can hold."""
    window = pb.ReportWindow(first_seq=records[0][0], last_seq=records[-1][0])
    cells: dict[object, list[Record]] = {}
    alone: list[Record] = []
    for record in told_once(records):
        _, choice, result = record
        if choice.probe_id or result.copying is not None or result.read or result.reviews or result.flags & ALONE:
            alone.append(record)
            continue
        like = result.batch_size, result.speculation_length, result.flags, choice.decision_version
        cells.setdefault((*like, bool(result.class_histograms)), []).append(record)
    for members in cells.values():
        usual, far = apart(members)
        alone += far if len(usual) > 1 else members
        if len(usual) > 1:
            window.sums.append(to_sum(usual))
    window.reports.extend(to_report(*record) for record in sorted(alone, key=lambda record: record[0]))
    return window


def told_once(records: Sequence[Record]) -> list[Record]:
    """The same steps, but all that was read is told by the first of those that tell any: the others can be added up."""
    reading, told = Reading(), list[Record]()
    for _, _, result in records:
        reading.add(result.read)
    for seq, choice, result in records:
        if result.read:
            told.append((seq, choice, replace(result, read=reading.counts)))
            reading = Reading()
        else:
            told.append((seq, choice, result))
    return told


def apart(members: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Steps of the usual time, and those that took much longer or shorter."""
    middle = median_low([result.latency_s for _, _, result in members])
    usual: list[Record] = []
    far: list[Record] = []
    for record in members:
        (usual if middle / FAR <= record[2].latency_s <= middle * FAR else far).append(record)
    return usual, far


def to_sum(members: Sequence[Record]) -> pb.StepSum:
    """The sum of steps that were alike."""
    first_seq, choice, one = members[0]
    results = [result for _, _, result in members]
    kinds = sorted({kind for result in results for kind, _ in result.class_histograms})
    return pb.StepSum(
        first_seq=first_seq,
        num_steps=len(results),
        batch_size=one.batch_size,
        speculation_length=one.speculation_length,
        latency_sum_s=sum(result.latency_s for result in results),
        latency_square_sum_s2=sum(result.latency_s**2 for result in results),
        accepted_histogram=added(result.accepted_histogram for result in results),
        mean_context_length=sum(result.mean_context_length for result in results) / len(results),
        decision_version=choice.decision_version,
        flags=[FLAGS[flag] for flag in one.flags],
        draft_prompt_s=sum(result.draft_prompt_s for result in results),
        num_new_rows=sum(result.num_new_rows for result in results),
        class_histograms=[
            pb.ClassHistogram(
                request_class=CLASSES[kind],
                accepted_histogram=added(
                    runs for result in results for mine, runs in result.class_histograms if mine == kind
                ),
            )
            for kind in kinds
        ],
    )


def added(histograms: Iterable[Sequence[int]]) -> list[int]:
    """The sum of histograms of one length."""
    return [sum(entries) for entries in zip(*histograms, strict=True)]
