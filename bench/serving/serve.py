"""`speclen bench serve`: serve the same traffic by every policy, in short blocks on one warm worker, and compare."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import typer
from rich.console import Console

from speclen.bench.serving.load import LENGTHS, Prompt, ServedBlock, busy_block, busy_rate, figures_of, serve_block
from speclen.bench.serving.outputs import OutputCheck, target_alone
from speclen.bench.serving.plan import Plan
from speclen.bench.serving.prompts import PromptDrawer
from speclen.bench.serving.report import print_comparison, to_document, write_document
from speclen.bench.serving.rounds import Comparison, Round, run_rounds
from speclen.bench.serving.traffic import Block, make_block
from speclen.bench.serving.warm import WarmWorker
from speclen.cli.support.flags import flags_from
from speclen.cli.support.machine import machine, provenance
from speclen.cli.support.output import UserError, check_place, say
from speclen.process.settings import settings_of
from speclen.worker.config import WorkerConfig

FIRST_LEARNING_BLOCK = 1_000_000  # larger than the number of any round


@flags_from(Plan)
@flags_from(WorkerConfig, "draft", "device", "dtype", "backend", "max_length", "threads", "profile")
def serve(
    target: str = typer.Option("bundled:target-60m", help="Target model, as for a worker."),
    max_batch_size: int = typer.Option(16, min=1, help="Sequences decoding in one step."),
    out: Path | None = typer.Option(None, help="Write the comparison as JSON."),
    reports: Path | None = typer.Option(None, help="Keep the database of `adaptive`, for `speclen replay --db FILE`."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON on stdout instead of tables."),
    **others: Any,
) -> None:
    """Serve blocks of one track by every policy in turn, on one worker that stays warm, and compare latencies.

    Example: speclen bench serve --track mixed --compare adaptive,fixed:0-8,n-gram --minutes 15
    """
    for place in (out, reports):
        if place is not None:
            check_place(place, of_database=place is reports)
    try:
        plan = plan_of(target, max_batch_size, others)
        if reports is not None and "adaptive" not in plan.names:
            raise ValueError(f"--reports {reports} keeps what `adaptive` reports: name it with --compare")
        document, comparison = run(plan, reports)
        if out is not None:
            write_document(document, out)
    except ValueError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from error
    if as_json:
        print(json.dumps(document))
    else:
        print_comparison(document, comparison, Console())


def plan_of(target: str, max_batch_size: int, others: dict[str, Any]) -> Plan:
    """The plan given by the flags. Raises ValueError for a setting outside its bounds."""
    of_plan = {name: others.pop(name) for name in settings_of(Plan)}
    return Plan(WorkerConfig(target=target, max_batch_size=max_batch_size, **others), **of_plan)


def run(plan: Plan, reports: Path | None) -> tuple[dict[str, Any], Comparison]:
    """Measure capacity, run rounds and check outputs. Raises UserError, or ValueError, also for wrong outputs.

    reports: file for the database of `adaptive`.
    """
    turns = len(plan.recipe.at_once) or 1  # raises for an unknown workload, before anything starts
    comparison = Comparison(tuple(plan.names), turns=turns)
    with WarmWorker(plan.settings) as worker:
        session = Session(plan, worker)
        if plan.capacity is None and not plan.recipe.at_once:  # closed loops have no loads
            session.measure_capacity()
        facts = session.facts()
        session.warm_up()
        begun = time.monotonic()
        run_rounds(
            *(comparison, session.serve_round, time.monotonic, begun + 60 * plan.minutes),
            *(plan.repeats or 10_000, say, plan.seed),
        )
        if reports is not None:
            worker.keep_reports(reports)
    facts["outputs"] = session.outputs.verdict(target_alone(plan.settings.target), facts["context"]["dtype"], plan.seed)
    return to_document(comparison, facts), comparison


class Session:
    """The policies of a plan on one worker, and the blocks that they serve.

    capacity: tokens per second at a load of 1. rates: tokens per second by length, if measured.
    """

    def __init__(self, plan: Plan, worker: WarmWorker) -> None:
        from speclen.worker.models.loading import load_tokenizer  # here, since torch takes seconds to import

        self.plan, self.worker = plan, worker
        self.capacity, self.rates = plan.capacity or 1.0, list[float]()
        self.drawer = PromptDrawer(load_tokenizer(plan.settings.target))
        self.outputs = OutputCheck()

    def measure_capacity(self) -> None:
        """Keep every slot busy at each fixed length: first to warm up, then to measure. Raises ValueError with a reason."""
        say("capacity: every slot is busy for a while; --capacity TOKENS_PER_S does without")
        settings, slots = self.plan.settings, self.plan.settings.max_batch_size
        block = busy_block(self.plan.track, slots, self.plan.seed)
        prompts = self.drawer.for_arrivals(block.arrivals)
        for length in LENGTHS[: settings.max_length + 1 if settings.has_draft else 1]:
            policy = f"fixed:{length}"
            # The first requests compile new shapes.
            self._serve(policy, replace(block, arrivals=block.arrivals[:slots]), prompts[:slots])
            self.rates.append(busy_rate(self._serve(policy, block, prompts).outcomes))
        self.capacity = max(self.rates)
        say(f"capacity: {self.capacity:.0f} tokens/s")

    def warm_up(self) -> None:
        """Run one round that is not counted; then let `adaptive` learn."""
        if "adaptive" in self.plan.names:
            self.worker.learn()
        say(f"warming up: one round of {self.block(0).duration_s:g} s a policy, which is not counted")
        self.serve_round(0, self.plan.names)
        if "adaptive" in self.plan.names:
            self.learn()

    def block(self, number: int) -> Block:
        plan = self.plan
        return make_block(plan.track, self.capacity, number, plan.seed, plan.block_s)

    def serve_round(self, number: int, order: Sequence[str]) -> Round:
        """Serve one block by every policy, in this order."""
        block = self.block(number)
        prompts = self.drawer.for_arrivals(block.arrivals)
        served = {}
        for name in order:
            served[name] = self._serve(name, block, prompts)
            say(line_of(number, name, served[name]))
        self.outputs.add(block.arrivals, prompts, {name: one.outcomes for name, one in served.items()})
        return Round(number, tuple(order), {name: figures_of(one) for name, one in served.items()})

    def learn(self) -> None:
        """Let `adaptive` serve the workload for a while before it is compared."""
        blocks = math.ceil(self.plan.learn_s / self.block(0).duration_s)
        say(f"`adaptive` learns from {blocks} blocks, which are not counted")
        for number in range(FIRST_LEARNING_BLOCK, FIRST_LEARNING_BLOCK + blocks):
            block = self.block(number)
            self._serve("adaptive", block, self.drawer.for_arrivals(block.arrivals))

    def _serve(self, policy: str, block: Block, prompts: Sequence[Prompt]) -> ServedBlock:
        """Serve one block by one policy. Raises UserError if the worker has ended."""
        self.worker.use(policy)
        try:
            return self.worker.runner.run(serve_block(self.worker.address, block, prompts))
        except grpc.RpcError as error:
            raise UserError(f"the worker does not answer: {self.worker.last_line()}") from error

    def facts(self) -> dict[str, Any]:
        """Settings and machine that figures depend on."""
        import torch

        plan, context, block = self.plan, self.worker.context(), self.block(0)
        return {
            **provenance(),
            **plan.facts(),
            "machine": machine(torch.device("cuda" if "cuda" in context.device else "cpu")),
            "context": {field.name: getattr(context, field.name) for field in context.DESCRIPTOR.fields},
            "track": block.track,
            "summary": plan.recipe.summary,
            "block_s": block.duration_s,
            "at_once": list(plan.recipe.at_once),
            "capacity_tokens_per_s": None if plan.recipe.at_once else self.capacity,
            "capacity_by_visit": self.rates,
        }


def line_of(number: int, name: str, served: ServedBlock) -> str:
    done = [outcome.latency_s for outcome in served.outcomes if not outcome.error]
    failed = len(served.outcomes) - len(done)
    mean = f"mean latency {sum(done) / len(done):.3f} s" if done else "nothing finished"
    return f"round {number:>3} {name:<16} {len(done)} requests, {mean}{f', {failed} FAILED' if failed else ''}"
