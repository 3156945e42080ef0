"""The engine: continuous batching with one speculative step per iteration.

The life of a request: `submit` checks it and puts its sequences in the inbox. `step` gives them rows and runs one
speculative step over all decoding rows, with prefill in chunks beside it. New tokens go to the request's callback, and a
finished row is free before the next step. On an asynchronous device, callbacks run during the next step. One thread calls
`run` (or `step`); all else may be called from any thread.

A step that fails is run again in parts, and a part that fails ends its own requests: `StepExecutor`.

Greedy output is the target's own, and sampled output follows the target's distribution, whatever is drafted and whatever
shares the batch. A request with a seed gives the same tokens in any batch and under any arm: its noise depends on seed,
sequence and position only. Both hold up to rounding: the last bits of a sum depend on the shape of a product, so two tokens
whose logits agree to about 1e-5 in float32 may change places. In 16 bits such near ties are common: outputs in different
batches diverge after some tens to hundreds of tokens, with and without speculation, as in any batching engine.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from speclen.records import PLAIN, Arm, StepRecord
from speclen.worker.drafting.arm_chooser import ArmChoice, ArmChooser
from speclen.worker.engine.execution import StepExecutor
from speclen.worker.engine.inbox import Inbox
from speclen.worker.engine.outbox import Outbox, Totals, describe
from speclen.worker.engine.preparation import EngineConfig, PreparedPair, prepare
from speclen.worker.engine.scheduler import Scheduler
from speclen.worker.engine.step_plan import Proposals, StepPlan, plan_prompts, plan_proposals
from speclen.worker.engine.step_runner import StepRunner
from speclen.worker.evaluation.evaluator import Evaluator
from speclen.worker.models.loading import ModelPair
from speclen.worker.requests.detokenize import make_decode, special_texts, spelled_tokens
from speclen.worker.requests.request import EngineFailedError, GenerationRequest
from speclen.worker.requests.sequence import OnOutput, SequenceState, SharedPrompt
from speclen.worker.requests.validation import check_request

__all__ = ["Engine", "EngineConfig", "EngineLoad"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineLoad(Totals):
    """Load of the engine, and its totals.

    num_kv_tokens_*: tokens of KV in use, and at most. num_looked_up_tokens: prompt tokens looked up in the prefix cache.
    num_reused_tokens: those found in it, which need no prefill.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_kv_tokens_used: int = 0
    num_kv_tokens_total: int = 0
    num_looked_up_tokens: int = 0
    num_reused_tokens: int = 0


class Engine:
    """Serves a pair of models. prepared: the result of `prepare`; None: made here.

    Raises ModelError when a model cannot be served exactly.
    """

    def __init__(
        self, pair: ModelPair, config: EngineConfig, chooser: ArmChooser, prepared: PreparedPair | None = None
    ) -> None:
        self.pair = pair
        self.config = config
        self._chooser = chooser
        self.num_threads = self._wanted_threads = torch.get_num_threads()  # on a CPU
        prepared = prepared or prepare(pair, config)
        self.backend = prepared.backend
        self.target, self.draft = prepared.target, prepared.draft
        self.limits = prepared.limits
        self.max_context_length = prepared.max_context_length
        self.scheduler = Scheduler(
            self.target.pool,
            self.draft.pool if self.draft is not None else None,
            prepared.limits.max_batch_size,
            prepared.max_kv_tokens,
            slack=config.max_proposed_tokens,
            vocab_size=pair.vocab_size,
        )
        generator = torch.Generator(pair.device)
        generator.seed() if config.seed is None else generator.manual_seed(config.seed)
        self.runner = StepRunner(self.target, self.draft, config.prefill_chunk, generator)
        self._decode_text = {skip: make_decode(pair.tokenizer, skip) for skip in (True, False)}
        self._special_texts = special_texts(pair.tokenizer)
        self._inbox = Inbox()
        most = Arm(config.max_speculation_length, config.ngram).max_tokens
        self._outbox = Outbox(self._inbox.forget, most, holds_back=self.target.asynchronous)
        evaluator = Evaluator(self.target, self.draft, self.limits, config.prefill_chunk, pair.vocab_size)
        self._executor = StepExecutor(self.runner, self._outbox, self.scheduler, evaluator)

    # Called from any thread.

    def check(self, request: GenerationRequest) -> None:
        """Raises ValueError naming the field of a request that this engine cannot serve."""
        limits = self.max_context_length, self.config.max_speculation_length
        check_request(request, self.pair.vocab_size, *limits)

    def submit(self, request: GenerationRequest, on_output: OnOutput) -> None:
        """Take all sequences of a request. Raises as `check`, `sequences` and `take`."""
        self.check(request)
        self.take(list(self.sequences(request, on_output)))

    def sequences(self, request: GenerationRequest, on_output: OnOutput) -> Iterator[SequenceState]:
        """Make the sequences of a checked request one by one. Raises ValueError for one that never fits the KV cache.

        on_output is called from the engine's thread and must not block.
        """
        shared = SharedPrompt() if request.sampling.n > 1 else None
        shown = request.sampling.include_special_tokens
        hidden = {} if shown else spelled_tokens(request.sampling.stop, self._special_texts)
        for index in range(request.sampling.n):
            sequence = SequenceState(
                request,
                index,
                on_output,
                decode=self._decode_text[not shown],
                eos_token_ids=self.pair.eos_token_ids,
                max_context_length=self.max_context_length,
                draft_context_length=0 if self.draft is None else self.draft.max_context_length,
                shared=shared,
                hidden=hidden,
            )
            self.scheduler.check_fits(sequence)
            yield sequence

    def take(self, sequences: Sequence[SequenceState]) -> None:
        """Queue sequences of one request for rows, first come first served.

        Raises DrainingError, EngineFailedError, or ValueError for an id in use.
        """
        self._inbox.put(sequences)

    def abort(self, request_id: str) -> bool:
        """End a request after the running step. Returns True if it was running or waiting."""
        return self._inbox.abort(request_id)

    def stop(self) -> None:
        """Let `run` return after the running step, and abort unfinished requests."""
        self._inbox.stop()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine; None while it can serve."""
        return self._inbox.failure

    def use_threads(self, num_threads: int) -> None:
        """Compute with that many CPU threads from the next step on."""
        self._wanted_threads = num_threads

    def use_chooser(self, chooser: ArmChooser) -> None:
        """Switch to another chooser of arms, while nothing runs."""
        self._chooser = chooser

    def load(self) -> EngineLoad:
        """A snapshot, whose numbers may belong to neighbouring steps."""
        return EngineLoad(
            **asdict(self._outbox.totals),
            num_running=len(self.scheduler.rows),
            num_waiting=self._inbox.num_incoming + len(self.scheduler.waiting),
            num_kv_tokens_used=sum(sequence.target_length for sequence in self.scheduler.rows),
            num_kv_tokens_total=self.scheduler.max_kv_tokens,
            num_looked_up_tokens=self.target.pool.num_looked_up_tokens,
            num_reused_tokens=self.target.pool.num_reused_tokens,
        )

    # The engine's thread.

    def run(self) -> None:
        """Step until `stop`; sleep while there is nothing to do.

        An exception outside of a step's own work ends all requests, and the engine goes on empty. If even that fails, the
        engine ends: requests get an error, and EngineFailedError is raised here and from then on by `submit`.
        """
        try:
            stopping = False
            while not stopping:
                stopping = self._inbox.wait(busy=bool(self.scheduler.rows or self.scheduler.waiting))
                try:
                    self.step()
                except Exception as error:
                    log.exception("an iteration failed outside its step; all requests end")
                    self._recover(error)
        except BaseException as error:
            raise self._fail(error) from error

    def _recover(self, error: Exception) -> None:
        """Start again with empty rows, since their state is unknown."""
        self._outbox.deliver()
        unfinished = self._inbox.give_up()
        self.scheduler.clear()
        self._outbox.abort(unfinished, error)

    def _fail(self, error: BaseException) -> EngineFailedError:
        """End every request with an error, whatever else fails."""
        log.critical("the engine ends", exc_info=error)
        failure = EngineFailedError(f"the engine has ended ({describe(error)}): start the worker again")
        failure.__cause__ = error
        self.scheduler.rows.clear()
        self.scheduler.waiting.clear()
        with contextlib.suppress(BaseException):
            self._outbox.deliver()
        self._outbox.abort(self._inbox.give_up(failure), failure)
        return failure

    @torch.inference_mode()
    def step(self) -> StepRecord | None:
        """One iteration: admit sequences, then run a step of the decoding rows with prefill. None when no row decoded."""
        started = time.perf_counter()
        self._adjust_threads()
        self._take_in()
        plan = self._plan()
        if not plan.sequences:
            self._outbox.deliver()
            return None
        record = self._executor.run(plan, started, self._chooser.wants_evaluations)
        if record is not None:
            self._chooser.report(record)
        return record

    def _adjust_threads(self) -> None:
        wanted = self._wanted_threads
        if wanted != self.num_threads:
            models = [model for model in (self.target, self.draft) if model is not None]
            try:
                for model in models:
                    model.use_threads(wanted)
                self.num_threads = wanted
            except Exception:
                log.exception("%d threads cannot be used: %d stay", wanted, self.num_threads)
                self._wanted_threads = self.num_threads  # else tried before every step
                for model in models:  # one of them may have changed
                    with contextlib.suppress(Exception):
                        model.use_threads(self.num_threads)

    def _take_in(self) -> None:
        """Queue submitted sequences and end aborted ones."""
        incoming, aborting = self._inbox.take()
        self.scheduler.add(incoming)
        if aborting:
            for request_id in aborting:
                self._outbox.abort(self.scheduler.drop_waiting(request_id))
            self._executor.end([s for s in self.scheduler.rows if s.request.request_id in aborting])

    def _plan(self) -> StepPlan:
        """Admit sequences, select the arm, and plan the next step."""
        num_new, prefilled = self._admit()
        rows = self.scheduler.decoding
        chunks = plan_prompts(self.scheduler.rows[len(rows) :], self.config.prefill_chunk)
        prefilled = prefilled or bool(chunks)
        choice, proposals = ArmChoice(PLAIN), Proposals.none(0)
        if rows:
            choice = self._chooser.choose(len(rows), prefilled)
            choice = choice._replace(arm=choice.arm.within(self.limits))
            prefilling = [chunk.sequence for chunk in chunks]
            drafting_context = (self.draft or self.target).max_context_length
            proposals = plan_proposals(rows, choice.arm, self.target.max_context_length, drafting_context, prefilling)
        plan = StepPlan(rows, self.scheduler.num_drafting, choice, proposals, chunks, prefilled, num_new)
        if rows and self._executor.num_plain_steps:
            self._executor.num_plain_steps -= 1
            plan = plan.plainly()
        return plan

    def _admit(self) -> tuple[int, bool]:
        """Give rows to waiting sequences. Returns how many lack their first token, and True if any got it here."""
        num_before = len(self.scheduler.rows)
        for sequence, error in self.scheduler.admit():
            log.error("request %s cannot start; it ends", sequence.request.request_id, exc_info=error)
            self._outbox.abort([sequence], error)
        new = self.scheduler.rows[num_before:]
        started = self._start_from_shared()
        return sum(sequence not in started for sequence in new), bool(started)

    def _start_from_shared(self) -> list[SequenceState]:
        """Start sequences whose shared prompt is prefilled; returns them, with their first token."""
        started: list[SequenceState] = []
        while (pair := self.scheduler.next_copy()) is not None:
            sequence, source = pair
            try:
                ids, logprobs = self.runner.copy_prompt(sequence, source)
            except Exception as error:
                log.exception("copying a prompt of %d tokens failed; its request ends", sequence.num_prompt_tokens)
                self._executor.end([sequence], error)
            else:
                self._outbox.hand_out(sequence, ids, logprobs)
                self.scheduler.settle([sequence])
                started.append(sequence)
        return started
