"""The engine: continuous batching with one speculative step per iteration.

The life of a request: `check`, `sequences` and `enqueue` put its sequences in the inbox. `step` gives them slots and runs
one speculative step over all decoding sequences, together with a chunk of prefill. New tokens go to the request's
callback, and the slot of a finished sequence is free before the next step. On an asynchronous device, callbacks run
during the next step. One thread calls `run` (or `step`); all other methods may be called from any thread.

A step that fails is run again in parts, and a part that fails ends only its own requests: `StepExecutor`.

Greedy output is the target's own, and sampled output follows the target's distribution, whatever is drafted and whatever
else is in the batch. A request with a seed gives the same tokens in any batch and under any arm: its noise depends on seed,
sequence and position only. Both hold up to rounding: the last bits of a sum depend on the shape of a matrix product, so two
tokens whose logits agree to about 1e-5 in float32 may change places. In 16 bits such near ties are common: outputs in
different batches diverge after tens to hundreds of tokens, with and without speculation, as in any batching engine.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from speclen.records import PLAIN, Arm, StepRecord
from speclen.worker.arms import ArmChoice, ArmChooser
from speclen.worker.engine.evaluation import Evaluator
from speclen.worker.engine.execution import Outbox, StepExecutor, Totals, describe
from speclen.worker.engine.inbox import Inbox
from speclen.worker.engine.preparation import EngineConfig, PreparedPair, prepare
from speclen.worker.engine.scheduler import Scheduler
from speclen.worker.engine.step_plan import Proposals, StepPlan, plan_prompts, plan_proposals
from speclen.worker.engine.step_runner import StepRunner
from speclen.worker.models.loading import ModelPair
from speclen.worker.requests.detokenize import make_decode, special_texts, spelled_tokens
from speclen.worker.requests.request import EngineFailedError, GenerationRequest, check_request
from speclen.worker.requests.sequence import OnOutput, SequenceState, SharedPrompt

__all__ = ["Engine", "EngineConfig", "EngineLoad"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineLoad(Totals):
    """Present load of the engine, and its totals.

    num_kv_tokens_used, num_kv_tokens_total: tokens in the KV cache, and its capacity. num_looked_up_tokens: prompt tokens
    looked up in the prefix cache. num_reused_tokens: those found there, which need no prefill.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_kv_tokens_used: int = 0
    num_kv_tokens_total: int = 0
    num_looked_up_tokens: int = 0
    num_reused_tokens: int = 0


class Engine:
    """Serves a target with its draft model. prepared: the result of `prepare`, which is called here if None.

    Raises ModelError if a model cannot be served exactly.
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
        """Raise ValueError, naming the field, if this engine cannot serve the request."""
        limits = self.max_context_length, self.config.max_speculation_length
        check_request(request, self.pair.vocab_size, *limits)

    def submit(self, request: GenerationRequest, on_output: OnOutput) -> None:
        """Queue all sequences of a request. Raises the errors of `check`, `sequences` and `take`."""
        self.check(request)
        self.enqueue(list(self.sequences(request, on_output)))

    def sequences(self, request: GenerationRequest, on_output: OnOutput) -> Iterator[SequenceState]:
        """Make the sequences of a checked request one by one. Raises ValueError if one can never fit in the KV cache.

        on_output is called from the engine's thread and must not block.
        """
        shared = SharedPrompt() if request.sampling.n > 1 else None
        with_special = request.sampling.include_special_tokens
        hidden = {} if with_special else spelled_tokens(request.sampling.stop, self._special_texts)
        for index in range(request.sampling.n):
            sequence = SequenceState(
                request,
                index,
                on_output,
                decode=self._decode_text[not with_special],
                eos_token_ids=self.pair.eos_token_ids,
                max_context_length=self.max_context_length,
                draft_context_length=0 if self.draft is None else self.draft.max_context_length,
                shared=shared,
                hidden=hidden,
            )
            self.scheduler.check_fits(sequence)
            yield sequence

    def enqueue(self, sequences: Sequence[SequenceState]) -> None:
        """Queue sequences of one request for slots, first come first served.

        Raises DrainingError, EngineFailedError, or ValueError if the request id is in use.
        """
        self._inbox.put(sequences)

    def abort(self, request_id: str) -> bool:
        """End a request after the running step. Returns True if it was running or waiting."""
        return self._inbox.abort(request_id)

    def stop(self) -> None:
        """Make `run` return after the running step, and abort unfinished requests."""
        self._inbox.stop()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine; None while it can serve."""
        return self._inbox.failure

    def use_threads(self, num_threads: int) -> None:
        """Use this number of CPU threads from the next step on."""
        self._wanted_threads = num_threads

    def use_chooser(self, chooser: ArmChooser) -> None:
        """Replace the chooser of arms. Only while nothing runs."""
        self._chooser = chooser

    def load(self) -> EngineLoad:
        """A snapshot from any thread. Its numbers may come from two neighbouring steps."""
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
        """Run steps until `stop`; sleep while there is nothing to do.

        An exception outside of a step's own work ends all requests, and the engine continues empty. If the recovery fails,
        the engine ends: all requests get an error, and this method and every later `submit` raise EngineFailedError.
        """
        try:
            stopping = False
            while not stopping:
                stopping = self._inbox.wait(busy=bool(self.scheduler.rows or self.scheduler.waiting))
                try:
                    self.step()
                except Exception as error:
                    log.exception("an iteration failed outside its step: all requests end")
                    self._recover(error)
        except BaseException as error:
            raise self._fail(error) from error

    def _recover(self, error: Exception) -> None:
        """End all requests and empty all slots, since their state is unknown."""
        self._outbox.deliver()
        unfinished = self._inbox.give_up()
        self.scheduler.clear()
        self._outbox.abort(unfinished, error)

    def _fail(self, error: BaseException) -> EngineFailedError:
        """End every request with an error, even if its last output cannot be delivered."""
        log.critical("the engine ends", exc_info=error)
        failure = EngineFailedError(f"the engine has ended ({describe(error)}): restart the worker")
        failure.__cause__ = error
        self.scheduler.rows.clear()
        self.scheduler.waiting.clear()
        with contextlib.suppress(BaseException):
            self._outbox.deliver()
        self._outbox.abort(self._inbox.give_up(failure), failure)
        return failure

    @torch.inference_mode()
    def step(self) -> StepRecord | None:
        """One iteration: admit sequences, plan a step of decoding and prefill, and run it. None if no sequence decoded."""
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
                log.exception("cannot change to %d CPU threads: %d stay in use", wanted, self.num_threads)
                self._wanted_threads = self.num_threads  # or the change would be tried again before every step
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
        """Admit sequences, select the arm for the decoding batch, and plan the next step."""
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
        """Admit waiting sequences. Returns how many still lack their first token, and True if any got it from a copy."""
        num_before = len(self.scheduler.rows)
        for sequence, error in self.scheduler.admit():
            log.error("request %s ends: it cannot start", sequence.request.request_id, exc_info=error)
            self._outbox.abort([sequence], error)
        new = self.scheduler.rows[num_before:]
        started = self._start_from_shared()
        return sum(sequence not in started for sequence in new), bool(started)

    def _start_from_shared(self) -> list[SequenceState]:
        """Start sequences whose prompt another one of their request has prefilled. Returns them, with their first token."""
        started: list[SequenceState] = []
        while (pair := self.scheduler.next_copy()) is not None:
            sequence, source = pair
            try:
                ids, logprobs = self.runner.copy_prompt(sequence, source)
            except Exception as error:
                log.exception("copying a prompt of %d tokens failed: its request ends", sequence.num_prompt_tokens)
                self._executor.end([sequence], error)
            else:
                self._outbox.accept(sequence, ids, logprobs)
                self.scheduler.settle([sequence])
                started.append(sequence)
        return started
