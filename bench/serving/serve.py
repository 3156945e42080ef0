"""`speclen bench serve`: serve the same traffic by every policy, in short blocks on one warm worker, and compare."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import typer
from rich.console import Console

from speclen.bench.serving.load import (
    LENGTHS,
    BlockFigures,
    Prompt,
    ServedBlock,
    busy_block,
    busy_rate,
    figures_of,
    serve_block,
)
from speclen.bench.serving.outputs import OutputCheck, target_alone
from speclen.bench.serving.plan import SLOTS, Plan
from speclen.bench.serving.prompts import PromptDrawer
from speclen.bench.serving.report import print_comparison, to_document, write_document
from speclen.bench.serving.rounds import Comparison, PolicyFailedError, WorkerEndedError, run_rounds
from speclen.bench.serving.traffic import Arrival, Block, make_block, recipe_of
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
    max_batch_size: int = typer.Option(0, min=0, help="Sequences decoding in one step; 0: as many as the track needs."),
    out: Path | None = typer.Option(None, help="Write the comparison as JSON, after every round."),
    reports: Path | None = typer.Option(
        None, help="Keep the database of the first policy that learns, for `speclen replay --db FILE`."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON on stdout instead of tables."),
    **others: Any,
) -> None:
    """Serve blocks of one track by every policy in turn, on one worker that stays warm, and compare their speed.

    Example: speclen bench serve --track mixed --compare adaptive,fixed:0-8,n-gram --minutes 15
    """
    for place in (out, reports):
        if place is not None:
            check_place(place, of_database=place is reports)
    try:
        plan = plan_of(target, max_batch_size, others)
        if reports is not None and not plan.learners:
            raise ValueError(f"--reports {reports} keeps what `adaptive` or `seeded` reports: name it with --compare")
        document, comparison = run(plan, out, reports)
    except (ValueError, PolicyFailedError) as error:
        raise UserError(str(error)) from error
    except WorkerEndedError as error:
        raise UserError(f"the worker has ended: {error}") from error
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from error
    if as_json:
        print(json.dumps(document))
    else:
        print_comparison(document, comparison, Console())
    if comparison.failures or comparison.ending:
        raise typer.Exit(1)


def plan_of(target: str, max_batch_size: int, others: dict[str, Any]) -> Plan:
    """The plan given by the flags. Raises ValueError for a setting outside its bounds."""
    of_plan = {name: others.pop(name) for name in settings_of(Plan)}
    slots = max_batch_size or max(recipe_of(of_plan["track"]).sizes, default=SLOTS)
    return Plan(WorkerConfig(target=target, max_batch_size=slots, **others), **of_plan)


def run(plan: Plan, out: Path | None, reports: Path | None) -> tuple[dict[str, Any], Comparison]:
    """Measure capacity, run rounds and check outputs. Raises UserError, or ValueError, also for wrong outputs.

    out: file for the comparison so far, after every round. reports: file for the database of the first learner.
    """
    comparison = Comparison(tuple(plan.names), closed=bool(plan.recipe.stages))
    with WarmWorker(plan.settings) as worker:
        session = Session(plan, worker)
        if plan.capacity is None and not comparison.closed:
            session.measure_capacity()
        facts = session.facts() | {"outputs": None}
        session.warm_up()

        def keep(so_far: bool = True) -> None:
            if out is not None:
                write_document(to_document(comparison, facts, so_far), out)

        until = time.monotonic() + 60 * plan.minutes
        run_rounds(comparison, session.serve, time.monotonic, until, plan.repeats or 10_000, keep, plan.seed)
        if not comparison.rounds:
            raise ValueError(f"nothing was measured: {comparison.ending or comparison.failures}")
        if reports is not None:
            worker.keep_reports(plan.learners[0], reports)
    facts["outputs"] = session.outputs.verdict(target_alone(plan.settings.target), facts["context"]["dtype"], plan.seed)
    keep(so_far=False)
    return to_document(comparison, facts), comparison


class Session:
    """The policies of a plan on one worker, and the blocks that they serve.

    capacity: tokens per second at a load of 1. rates: tokens per second by length, if measured.
    """

    def __init__(self, plan: Plan, worker: WarmWorker) -> None:
        from speclen.worker.models.loading import load_tokenizer  # here, since torch takes seconds to import

        self.plan, self.worker, self.info = plan, worker, worker.model_info()
        self.capacity, self.rates = plan.capacity or 1.0, list[float]()
        tokenizer = load_tokenizer(plan.settings.target)
        self.chat = bool(getattr(tokenizer, "chat_template", None))
        self.drawer = PromptDrawer(tokenizer)
        self.outputs = OutputCheck()
        self._drawn: tuple[Block, Sequence[Prompt]] | None = None

    def measure_capacity(self) -> None:
        """Keep every slot busy at each fixed length: first to warm up, then to measure. Raises ValueError with a reason."""
        say("capacity: every slot is busy for a while; --capacity TOKENS_PER_S does without")
        settings, slots = self.plan.settings, self.plan.settings.max_batch_size
        block = busy_block(self.plan.track, slots, self.plan.seed, self.chat)
        prompts = self.drawer.for_arrivals(block.arrivals)
        for length in LENGTHS[: settings.max_length + 1 if settings.has_draft else 1]:
            policy = f"fixed:{length}"
            # The first requests compile new shapes.
            self._serve(policy, replace(block, arrivals=block.arrivals[:slots]), prompts[:slots])
            self.rates.append(busy_rate(self._serve(policy, block, prompts).outcomes))
        self.capacity = max(self.rates)
        say(f"capacity: {self.capacity:.0f} tokens/s")

    def warm_up(self) -> None:
        """Serve one block by every policy that is not counted; then let the learning policies learn.

        Raises ValueError if a request of that block does not fit in the model's context.
        """
        block, prompts = self.block(0)
        check_context(block.arrivals, prompts, self.info.max_context_length, self.plan)
        for policy in self.plan.learners:
            self.worker.learn(policy, seeded=policy == "seeded")
        say("warming up: one block a policy, which is not counted")
        for policy in self.plan.names:
            say(line_of(0, policy, self._serve(policy, block, prompts)))
        for policy in self.plan.learners:
            self.learn(policy)

    def block(self, number: int) -> tuple[Block, Sequence[Prompt]]:
        """The block of that number, with its prompts."""
        if self._drawn is None or self._drawn[0].number != number:
            plan = self.plan
            block = make_block(plan.track, self.capacity, number, plan.seed, plan.block_s, self.chat)
            self._drawn = block, self.drawer.for_arrivals(block.arrivals)
        return self._drawn

    def serve(self, number: int, policy: str) -> BlockFigures:
        """Serve one block by one policy. Raises PolicyFailedError or WorkerEndedError."""
        block, prompts = self.block(number)
        served = self._serve(policy, block, prompts)
        say(line_of(number, policy, served))
        self.outputs.add(policy, block.arrivals, prompts, served.outcomes)
        return figures_of(served)

    def learn(self, policy: str) -> None:
        """Let a policy serve the workload for a while before it is compared."""
        say(f"{policy} learns for {self.plan.learn_s:g} s, which are not counted")
        until = time.monotonic() + self.plan.learn_s
        for number in itertools.count(FIRST_LEARNING_BLOCK):
            if time.monotonic() >= until:
                break
            self._serve(policy, *self.block(number))

    def _serve(self, policy: str, block: Block, prompts: Sequence[Prompt]) -> ServedBlock:
        """Serve one block by one policy. Raises PolicyFailedError, or WorkerEndedError."""
        self.worker.use(policy)
        try:
            return self.worker.runner.run(serve_block(self.worker.address, block, prompts))
        except grpc.RpcError as error:
            raise WorkerEndedError(self.worker.last_line()) from error

    def facts(self) -> dict[str, Any]:
        """Settings and machine that figures depend on."""
        import torch

        plan, context, (block, _) = self.plan, self.info.context, self.block(0)
        return {
            **provenance(),
            **plan.facts(),
            "machine": machine(torch.device("cuda" if "cuda" in context.device else "cpu")),
            "context": {field.name: getattr(context, field.name) for field in context.DESCRIPTOR.fields},
            "track": block.track,
            "summary": plan.recipe.summary,
            "block_s": block.duration_s,
            "at_once": list(plan.recipe.sizes),
            "capacity_tokens_per_s": None if plan.recipe.stages else self.capacity,
            "capacity_by_visit": self.rates,
        }


def check_context(arrivals: Sequence[Arrival], prompts: Sequence[Prompt], context: int, plan: Plan) -> None:
    """Raises ValueError if a request does not fit in the context."""
    longest = max(len(prompt) + arrival.output_tokens for arrival, prompt in zip(arrivals, prompts, strict=True))
    if longest > context:
        raise ValueError(
            f"--track {plan.track} has requests of {longest} tokens, and the context of {plan.settings.target} holds "
            f"{context}: use another --track or --target"
        )


def line_of(number: int, name: str, served: ServedBlock) -> str:
    done = [outcome for outcome in served.outcomes if not outcome.error]
    failed = len(served.outcomes) - len(done)
    rate = sum(outcome.num_tokens for outcome in done) / served.seconds
    mean = f"{rate:.0f} tokens/s, mean latency {sum(one.latency_s for one in done) / len(done):.3f} s" if done else ""
    words = mean or "nothing finished"
    return f"round {number:>3} {name:<16} {len(done)} requests, {words}{f', {failed} FAILED' if failed else ''}"
