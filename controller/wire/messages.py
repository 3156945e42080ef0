"""Turns the controller's values into messages. The other direction, with its checks, is validation.py."""

from __future__ import annotations

from collections.abc import Iterable

from speclen.controller.estimator.core import ContextKey, LearnedRow, Limits, Mix, Probe, Table
from speclen.controller.estimator.plans.plan import Plan
from speclen.v1 import control_pb2 as pb


def context_message(key: ContextKey) -> pb.ContextKey:
    return pb.ContextKey(
        target=key.target,
        draft=key.draft,
        device=key.device,
        dtype=key.dtype,
        engine_fingerprint=key.engine_fingerprint,
    )


def table_message(table: Table, limits: Limits) -> pb.LengthTable:
    """The table as a worker with these limits can use it; plans for one that can copy, lengths alone for another."""
    message = _lengths_message(table)
    most, most_copied = limits.max_speculation_length, limits.max_copied_tokens
    for sent, choice in zip(message.choices, table.choices, strict=True):
        sent.speculation_length = choice.length_within(most)
        if most_copied:
            plan = (choice.plan or Plan(sent.speculation_length)).within(most, most_copied)
            sent.plan.CopyFrom(plan_message(plan))
            sent.speculation_length = plan.draft_length
    return message


def plan_message(plan: Plan) -> pb.Plan:
    return pb.Plan(
        draft_length=plan.draft_length,
        copy_min_match=plan.copy_min_match,
        copy_max_tokens=plan.copy_max_tokens,
        draft_after_copy=plan.draft_after_copy,
    )


def _lengths_message(table: Table) -> pb.LengthTable:
    return pb.LengthTable(
        decision_version=table.version,
        choices=[
            pb.BucketChoice(
                batch_min=choice.bucket.batch_min,
                batch_max=choice.bucket.batch_max,
                speculation_length=choice.speculation_length,
                ms_per_token=choice.ms_per_token,
            )
            for choice in table.choices
        ],
    )


def mix_message(mix: Mix, most: int) -> pb.LengthMix:
    """The numbers for lengths up to `most`."""
    step_s, tokens = mix.step_s[:, : most + 1], mix.tokens[:, :, : most + 1]
    return pb.LengthMix(
        bucket_ends=mix.bucket_ends,
        num_lengths=step_s.shape[1],
        step_s=step_s.ravel().tolist(),
        tokens=tokens.ravel().tolist(),
    )


def probe_message(probe: Probe, valid_for_s: float) -> pb.Probe:
    return pb.Probe(
        probe_id=probe.probe_id,
        batch_min=probe.bucket.batch_min,
        batch_max=probe.bucket.batch_max,
        speculation_length=probe.speculation_length,
        valid_for_s=valid_for_s,
        plan=None if probe.plan is None else plan_message(probe.plan),
    )


def learned_table_message(key: ContextKey, version: int, rows: Iterable[LearnedRow]) -> pb.LearnedTable:
    return pb.LearnedTable(
        context=context_message(key), decision_version=version, rows=[learned_row_message(row) for row in rows]
    )


def learned_row_message(row: LearnedRow) -> pb.LearnedRow:
    estimate = row.estimate
    return pb.LearnedRow(
        batch_min=row.bucket.batch_min,
        batch_max=row.bucket.batch_max,
        speculation_length=estimate.speculation_length,
        expected_tokens=estimate.expected_tokens,
        step_ms=1e3 * estimate.step_s,
        ms_per_token=estimate.ms_per_token,
        ms_per_token_low=estimate.ms_per_token_low,
        ms_per_token_high=estimate.ms_per_token_high,
        num_steps=row.num_steps,
        source=row.source,
        is_best=row.is_best,
        observed_step_ms=None if row.observed_step_s is None else 1e3 * row.observed_step_s,
        num_reports_since=row.num_reports_since,
    )
