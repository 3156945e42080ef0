"""`speclen bench serve`: the same traffic for every policy, in short blocks on one warm worker, and what that says."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from speclen.bench.comparison.document import (
    add_to,
    check_alike,
    read_document,
    to_document,
    write_document,
)
from speclen.bench.comparison.outputs import OutputCheck, target_alone
from speclen.bench.comparison.plan import (
    Plan,
    load_tokenizer,
    machine_of,
    measured_capacity,
)
from speclen.bench.comparison.report import print_comparison
from speclen.bench.comparison.rounds import Comparison, Round, run_rounds
from speclen.bench.machine import provenance
from speclen.bench.serving.block import ServedBlock, figures_of, serve_block, settled_at
from speclen.bench.serving.capacity import capacity_of
from speclen.bench.serving.deployment import WorkerSettings
from speclen.bench.serving.load import Prompt
from speclen.bench.serving.policies import in_words, make_policy
from speclen.bench.serving.prompts import PromptDrawer
from speclen.bench.serving.tracks import Block, make_block
from speclen.bench.serving.warm import WarmWorker
from speclen.cli.support.errors import UserError, say
from speclen.cli.support.files import check_place
from speclen.cli.support.flags import flags_from
from speclen.transport.settings import settings_of
from speclen.worker.config import WorkerConfig

QUICK_BLOCK_S, QUICK_ROUNDS, QUICK_LEARN_S = 4.0, 2, 4.0
FIRST_LEARNING_BLOCK = 1_000_000  # numbers that no round comes to


@flags_from(Plan)
@flags_from(WorkerConfig, "draft", "device", "dtype", "backend", "max_length", "threads")
def serve(
    target: str = typer.Option("bundled:target-60m", help="Target model, as for a worker."),
    max_batch_size: int = typer.Option(16, min=1, help="Sequences decoding in one step."),
    quick: bool = typer.Option(False, help="Seconds instead of minutes, to see that all works; figures are marked."),
    add: bool = typer.Option(False, help="Go on with the rounds of --out, if it is there and was measured alike."),
    out: Path | None = typer.Option(None, help="Write the comparison as JSON."),
    reports: Path | None = typer.Option(None, help="Keep the database of `adaptive`, for `speclen replay --db FILE`."),
    plot: Path | None = typer.Option(None, help="Draw latency, rows and tokens proposed over time (png, svg, pdf)."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON on stdout instead of tables."),
    **others: Any,
) -> None:
    """Serve blocks of one track by every policy in turn, on one worker that stays warm, and compare latencies.

    Example: speclen bench serve --track mixed --compare adaptive,fixed:0-8,n-gram --minutes 15
    """
    if add and out is None:
        raise UserError("--add needs --out FILE, whose rounds it goes on with")
    for place in (out, reports, plot):
        if place is not None:
            check_place(place, of_database=place is reports)
    try:
        plan = plan_of(target, max_batch_size, quick, others)
        if reports is not None and "adaptive" not in plan.names:
            raise ValueError(f"--reports {reports} keeps what `adaptive` reports: name it with --compare")
        document, comparison = run(plan, quick, out if add else None, reports)
        if out is not None:
            write_document(document, out)
    except ValueError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from error
    if plot is not None:
        from speclen.bench.comparison.plot import plot as draw

        draw(document, plot)
    if as_json:
        print(json.dumps(document))
    else:
        print_comparison(document, comparison, Console())
        if quick:
            print("--quick: these figures show that everything works, and nothing else")


def plan_of(target: str, max_batch_size: int, quick: bool, others: dict[str, Any]) -> Plan:
    """The plan that the flags describe. Raises ValueError for a setting outside its bounds."""
    of_plan = {name: others.pop(name) for name in settings_of(Plan)}
    plan = Plan(WorkerSettings(target=target, max_batch_size=max_batch_size, **others), **of_plan)
    if not quick:
        return plan
    return replace(
        plan,
        block_s=plan.block_s or QUICK_BLOCK_S,
        repeats=plan.repeats or QUICK_ROUNDS,
        learn_s=min(plan.learn_s, QUICK_LEARN_S),
    )


def run(plan: Plan, quick: bool, earlier: Path | None, reports: Path | None) -> tuple[dict[str, Any], Comparison]:
    """Capacity, rounds, and the check of outputs. Raises ValueError or UserError, the former also for wrong outputs.

    earlier: rounds to go on with. reports: where to keep what `adaptive` has learned from.
    """
    names = plan.names
    turns = len(plan.recipe.at_once) or 1  # raises for a track that is none, before anything starts
    capacity, by_visit = plan.capacity, []
    if earlier is not None and earlier.exists():
        before = read_document(earlier)
        check_alike(earlier, before, {**provenance(), **plan.facts()})  # before anything starts
        capacity = capacity or before["capacity_tokens_per_s"]  # all rounds have the same loads
        by_visit = before.get("capacity_by_visit", [])
    comparison = Comparison(tuple(names), plan.resolution, turns=turns)
    with WarmWorker(plan.settings, plan.profile) as worker:
        if capacity is None and not plan.recipe.at_once:  # closed loops have no loads
            by_visit = measured_capacity(plan, worker)
            capacity = capacity_of(by_visit)
        session = Session(plan, worker, capacity or 1.0)
        facts = session.facts(quick) | {"capacity_by_visit": by_visit}
        if earlier is not None and earlier.exists():
            before = add_to(earlier, comparison, facts)
            facts["command"] = [*as_list(before["command"]), facts["command"]]
            facts["outputs"] = as_list(before["outputs"])
        session.open_policies(comparison.active)
        say(f"warming up: one round of {session.block(0).duration_s:g} s a policy, which is not counted")
        session.serve_round(0, comparison.active)
        for name in comparison.active:
            if name == "adaptive":
                session.learn(name)
        begun = time.monotonic()
        run_rounds(
            *(comparison, session.serve_round, time.monotonic, begun + 60 * plan.minutes),
            *(plan.repeats or 10_000, say, plan.seed),
        )
        dtype = facts["context"]["dtype"]
        if reports is not None:
            worker.keep_reports("adaptive", reports)
    checked = session.outputs.verdict(target_alone(plan.settings.target), dtype, plan.seed)
    facts["outputs"] = [*as_list(facts.get("outputs", [])), checked]
    return to_document(comparison, facts), comparison


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class Session:
    """Policies on one worker, and the blocks that they serve. capacity: tokens per second that loads are shares of."""

    def __init__(self, plan: Plan, worker: WarmWorker, capacity: float) -> None:
        self.plan = plan
        self.worker, self.capacity = worker, capacity
        settings = plan.settings
        limits = (settings.max_batch_size, settings.max_length)
        self.policies = {name: make_policy(name, *limits, plan.profile) for name in plan.names}
        self.drawer = PromptDrawer(load_tokenizer(settings.target))
        self.outputs = OutputCheck()

    def open_policies(self, names: Sequence[str]) -> None:
        for name in names:
            self.worker.open(self.policies[name])

    def block(self, number: int) -> Block:
        plan = self.plan
        return make_block(plan.track, self.capacity, number, plan.seed, plan.block_s, plan.scale)

    def serve_round(self, number: int, order: Sequence[str]) -> Round:
        """One block by every policy, in this order."""
        block = self.block(number)
        prompts = self.drawer.for_arrivals(block.arrivals)
        served = {}
        for name in order:
            served[name] = self._serve(name, block, prompts)
            say(line_of(number, name, served[name]))
        self.outputs.add(block.arrivals, prompts, {name: one.outcomes for name, one in served.items()})
        steps = self.plan.recipe.settle_steps
        at_s = settled_at(served["cold"], steps) if steps and "cold" in served else None
        blocks = {name: figures_of(one, block, at_s) for name, one in served.items()}
        return Round(number, tuple(order), blocks)

    def learn(self, name: str) -> None:
        """Let policies that learn serve the track for a while before they are compared."""
        blocks = math.ceil(self.plan.learn_s / self.block(0).duration_s)
        say(f"`{name}` learns from {blocks} blocks, which are not counted")
        for number in range(FIRST_LEARNING_BLOCK, FIRST_LEARNING_BLOCK + blocks):
            block = self.block(number)
            self._serve(name, block, self.drawer.for_arrivals(block.arrivals))

    def _serve(self, name: str, block: Block, prompts: Sequence[Prompt]) -> ServedBlock:
        """One block by one policy; who starts from nothing does so in every block."""
        if name == "cold":
            self.worker.close(name)
            self.worker.open(self.policies[name])
        self.worker.use(name)
        return self.worker.runner.run(serve_block(self.worker.address, block, prompts, self.plan.burners))

    def facts(self, quick: bool) -> dict[str, Any]:
        """Facts that the figures depend on."""
        plan, context = self.plan, self.worker.context()
        block = self.block(0)
        return {
            **provenance(),
            **plan.facts(),
            "quick": quick,
            "machine": machine_of(context),
            "context": {field.name: getattr(context, field.name) for field in context.DESCRIPTOR.fields},
            "track": block.track,
            "summary": plan.recipe.summary,
            "block_s": block.duration_s,
            "at_once": list(plan.recipe.at_once),
            "burners": plan.burners if block.throttle_at_s is not None else 0,
            "capacity_tokens_per_s": None if plan.recipe.at_once else self.capacity,
            "tables": {name: in_words(of.table) for name, of in self.policies.items() if of.table is not None},
        }


def line_of(number: int, name: str, served: ServedBlock) -> str:
    done = [outcome.latency_s for outcome in served.outcomes if not outcome.error]
    failed = len(served.outcomes) - len(done)
    mean = f"mean latency {sum(done) / len(done):.3f} s" if done else "nothing finished"
    return f"round {number:>3} {name:<16} {len(done)} requests, {mean}{f', {failed} FAILED' if failed else ''}"
