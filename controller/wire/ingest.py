"""The path of every report: from a protobuf message to what the estimator learns from and what the store keeps.

It runs once per step of every worker, so it costs a few microseconds and no more: one pass, one comparison chain, and
what can be known about a histogram (its sum, its text) remembered, since few differ. What the chain refuses is looked at
again by validation.py, which finds the words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul

from speclen.controller.estimator.core import Limits, StepObservation
from speclen.controller.wire.copies import Told, told_by
from speclen.controller.wire.flags import Flags
from speclen.controller.wire.validation import (
    MAX_CONTEXT_LENGTH,
    MAX_INTEGER,
    MAX_LATENCY_S,
    MAX_LENGTH,
    MIN_LATENCY_S,
    InvalidMessageError,
    explain_report,
    read_flags,
)
from speclen.v1 import control_pb2 as pb

RUNS = range(MAX_LENGTH + 1)
# Of a histogram so many entries are read: one more than any may have, so that a longer one is refused, and costs no more.
MOST_RUNS = len(RUNS) + 1
# Of a report's flags; many more than there are, each of which is there once.
MOST_FLAGS = 64
# Classes of requests by their numbers in the protocol, from 1 on, as the store names them.
CLASSES = ("greedy", "cool", "hot")
MAX_REMEMBERED = 65_536  # histograms; about 20 MB

# (length, sum, accepted tokens, JSON text)
HistogramFacts = tuple[int, int, int, str]
ByClass = tuple[tuple[int, tuple[int, ...]], ...]
_histograms: dict[tuple[int, ...], HistogramFacts] = {}
_flags: dict[frozenset[int], Flags] = {}
_NO_CLASSES: tuple[ByClass, str | None] = ((), None)
_NOTHING_TOLD = Told()
_ORDINARY = Flags("", True, True)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a message comes from: what its rows in the store share. Fields as in speclen.store.records.ReportRow."""

    context_id: int
    worker_key: int
    epoch: int
    received_at: float


@dataclass(slots=True)
class Group:
    """Plausible reports, once for the estimator and once for the store.

    rows: the values of speclen.store.records.ReportRow after group_id, which is known once the group is learned from.
    """

    observations: list[StepObservation] = field(default_factory=list)
    rows: list[tuple[object, ...]] = field(default_factory=list)


def read_reports(
    reports: Sequence[pb.StepReport], limits: Limits, origin: Origin, group: Group
) -> list[InvalidMessageError]:
    """Add plausible reports to the group; a bad one is refused alone, and the reasons come back."""
    refusals: list[InvalidMessageError] = []
    observe, keep = group.observations.append, group.rows.append
    max_batch_size, max_length = limits.max_batch_size, limits.max_speculation_length
    whose = origin.context_id, origin.worker_key, origin.epoch
    received_at, known = origin.received_at, _histograms
    for report in reports:
        seq, batch_size, length = report.seq, report.batch_size, report.speculation_length
        latency_s, context_length = report.latency_s, report.mean_context_length
        version, probe_id = report.decision_version, report.probe_id
        prompt_s, num_new_rows = report.draft_prompt_s, report.num_new_rows
        histogram = tuple(report.accepted_histogram[:MOST_RUNS])  # the slice makes it twice as fast
        facts = known.get(histogram) or remember(histogram)
        if not (
            0 < batch_size <= max_batch_size
            and facts[0] == length <= max_length
            and facts[1] == batch_size
            and MIN_LATENCY_S <= latency_s <= MAX_LATENCY_S
            and 0.0 <= context_length <= MAX_CONTEXT_LENGTH
            and 0 < seq <= MAX_INTEGER
            and version <= MAX_INTEGER
            and probe_id <= MAX_INTEGER
            and 0.0 <= prompt_s <= MAX_LATENCY_S
            and num_new_rows <= max_batch_size
        ):
            error = explain_report(report, limits)
            assert error is not None, "the two checks of a report disagree"
            refusals.append(error)
            continue
        by_class, classes_text = _NO_CLASSES
        if report.class_histograms:
            split = by_class_of(report, histogram, seq)
            if isinstance(split, InvalidMessageError):
                refusals.append(split)
                continue
            by_class, classes_text = split
        flags = meaning_of(report) if report.flags else _ORDINARY
        copies, read, reviews, text = _NOTHING_TOLD
        if report.read or report.reviews or report.HasField("copying"):
            told = told_by(report, flags)
            if isinstance(told, InvalidMessageError):
                refusals.append(told)
                continue
            copies, read, reviews, text = told
        teaches = flags.teaches_latency, flags.teaches_acceptance
        observe(
            StepObservation(
                *(batch_size, length, latency_s, histogram, context_length, *teaches, by_class),
                copying=copies,
                read=read,
                draft_prompt_s=prompt_s,
                reviews=reviews,
                num_new_rows=num_new_rows,
            )
        )
        step = (*whose, seq, batch_size, length, latency_s, facts[3], facts[2], context_length)
        keep(step + (version, probe_id, flags.names, received_at, classes_text, 1, None, text, prompt_s, num_new_rows))
    return refusals


def by_class_of(
    report: pb.StepReport | pb.StepSum, histogram: tuple[int, ...], seq: int
) -> tuple[ByClass, str] | InvalidMessageError:
    """The histogram by class, for the estimator and as JSON text; or why it is refused."""
    if len(report.class_histograms) > len(CLASSES):
        sentence = (
            f"report {seq}: class_histograms has {len(report.class_histograms)} entries for {len(CLASSES)} classes"
        )
        return InvalidMessageError("class_histograms", sentence)
    split: ByClass = tuple(
        (each.request_class - 1, tuple(each.accepted_histogram[:MOST_RUNS])) for each in report.class_histograms
    )
    kinds = [kind for kind, _ in split]
    if not set(kinds) <= set(range(len(CLASSES))) or len(set(kinds)) < len(kinds):
        named = [kind + 1 for kind in kinds]
        sentence = f"report {seq}: class_histograms has classes {named}; each of 1 to 3 may be there once"
        return InvalidMessageError("class_histograms", sentence)
    widths = {len(runs) for _, runs in split}
    if widths != {len(histogram)} or tuple(map(sum, zip(*(runs for _, runs in split), strict=True))) != histogram:
        sentence = f"report {seq}: class_histograms must add up to accepted_histogram, {list(histogram)}"
        return InvalidMessageError("class_histograms", sentence)
    return split, json.dumps({CLASSES[kind]: runs for kind, runs in split}, separators=(",", ":"))


def remember(histogram: tuple[int, ...]) -> HistogramFacts:
    """Length, sum, accepted tokens and JSON text of a histogram."""
    facts = (
        len(histogram) - 1,
        sum(histogram),
        sum(map(mul, histogram, RUNS)),
        str(list(histogram)),
    )
    if len(histogram) <= len(RUNS):  # a longer one is refused: not worth remembering
        if len(_histograms) >= MAX_REMEMBERED:
            _histograms.clear()
        _histograms[histogram] = facts
    return facts


def meaning_of(report: pb.StepReport | pb.StepSum) -> Flags:
    """Flags, remembered as far as all of them are known ones: the values of others are without number."""
    flags = frozenset(report.flags[:MOST_FLAGS])
    meaning = _flags.get(flags)
    if meaning is None:
        meaning = read_flags(flags)
        if "unknown" not in meaning.names:
            _flags[flags] = meaning
    return meaning
