"""The engine: continuous batching with one speculative step per iteration.

The life of a request: `submit` checks it and puts it in the queue; `step` gives its sequences rows and lets all decoding
rows take one speculative step together, in which prompts are fed along in chunks; every new token goes to the request's
callback; a finished row is free before the next step. One thread calls `run` (or `step`); everything else may be called
from any.

What is promised. Greedy output is what the target alone writes, and sampled output follows the target's distribution,
whatever is drafted and whoever shares the batch. A request with a seed gives the same tokens alone and in any batch, at any
speculation lengths: its noise goes by seed, sequence and position only. Both hold as far as the arithmetic allows: sums
depend on the shape of a product in their last bits, so two tokens whose logits (with noise, where sampled) agree to
about 1e-5 in float32 may change places. In 16 bits such near ties are common enough that outputs of different batches
drift apart after some tens to hundreds of tokens, with and without speculation, as in any batching engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from worker.captured_model import Recorder
from worker.detokenize import make_decode
from worker.engine_config import EngineConfig
from worker.inbox import Inbox
from worker.models import ModelPair
from worker.preparation import prepare
from worker.request import EngineFailedError, GenerationRequest, SequenceOutput
from worker.scheduler import Scheduler
from worker.sequence import OnOutput, Sequence, SharedPrompt
from worker.step_plan import PromptChunk
from worker.step_runner import StepRunner
from worker.steps import LengthChooser, StepFlag, StepResult
from worker.validation import check_request

__all__ = ["Engine", "EngineConfig", "EngineLoad"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engine is doing, and totals since its start. Tokens are of KV for num_kv_*, else generated ones."""

    num_running: int
    num_waiting: int
    num_kv_tokens_used: int
    num_kv_tokens_total: int
    num_steps: int
    num_row_steps: int
    num_generated_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int


class Engine:
    """Serves a pair of models. recorder: see `prepare`. Raises ModelError when a model cannot be served exactly."""

    def __init__(
        self, pair: ModelPair, config: EngineConfig, chooser: LengthChooser, recorder: Recorder | None = None
    ) -> None:
        self.pair = pair
        self.config = config
        self._chooser = chooser
        self.num_threads = self._wanted_threads = torch.get_num_threads()  # on a CPU
        prepared = prepare(pair, config, recorder)
        self.target, self.draft = prepared.target, prepared.draft
        self.max_batch_size = prepared.max_batch_size
        self.max_context_length = prepared.max_context_length
        self.scheduler = Scheduler(
            self.target.pool,
            self.draft.pool if self.draft is not None else None,
            prepared.max_batch_size,
            prepared.max_kv_tokens,
            slack=config.max_speculation_length,
        )
        generator = torch.Generator(pair.device)
        generator.seed() if config.seed is None else generator.manual_seed(config.seed)
        self.runner = StepRunner(self.target, self.draft, self.scheduler, self._tell, config.prefill_chunk, generator)
        self._decode_text = {skip: make_decode(pair.tokenizer, skip) for skip in (True, False)}

        self._inbox = Inbox(config.max_waiting)

    # Called from any thread.

    def submit(self, request: GenerationRequest, on_output: OnOutput) -> None:
        """Queue a request. on_output is called from the engine's thread and must not block.

        Raises ValueError naming the field, QueueFullError, DrainingError, or EngineFailedError.
        """
        sequences = self._make_sequences(request, on_output)
        self._inbox.put(request.request_id, sequences, self.scheduler.num_waiting)

    def abort(self, request_id: str) -> bool:
        """End a request after the running step; whether it was running or waiting."""
        return self._inbox.abort(request_id)

    def drain(self) -> None:
        """Take no new requests; those accepted go on to their end."""
        self._inbox.drain()

    def stop(self) -> None:
        """Let `run` return after the running step; what is unfinished is aborted."""
        self._inbox.stop()

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine; None while it can serve."""
        return self._inbox.failure

    def use_threads(self, num_threads: int) -> None:
        """Compute with that many CPU threads from the next step on."""
        self._wanted_threads = num_threads

    def load(self) -> EngineLoad:
        """A snapshot; its numbers may be of neighbouring steps."""
        totals = self.runner.totals
        return EngineLoad(
            num_running=len(self.scheduler.rows),
            num_waiting=self._inbox.num_incoming + self.scheduler.num_waiting,
            num_kv_tokens_used=self.scheduler.num_kv_tokens(),
            num_kv_tokens_total=self.scheduler.max_kv_tokens,
            num_steps=totals.num_steps,
            num_row_steps=totals.num_row_steps,
            num_generated_tokens=totals.num_generated_tokens,
            num_draft_tokens=totals.num_draft_tokens,
            num_accepted_tokens=totals.num_accepted_tokens,
        )

    # The engine's thread.

    def run(self) -> None:
        """Step until `stop`; sleep when there is nothing to do.

        An exception outside of what a step runs ends all requests, and the engine goes on empty. If even that fails, the
        engine ends: requests are told, and EngineFailedError is raised here and from then on by `submit`.
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
        """Begin anew with empty rows, since nobody knows what state they are in."""
        unfinished = self._inbox.give_up()
        self.scheduler.clear()
        self._abort(unfinished, error)

    def _fail(self, error: BaseException) -> EngineFailedError:
        """Tell every request that the engine has ended; whatever else is wrong must not keep it from that."""
        log.critical("the engine ends", exc_info=error)
        failure = EngineFailedError(f"the engine has ended ({describe(error)}): start the worker again")
        failure.__cause__ = error
        self.scheduler.rows.clear()
        self.scheduler.waiting.clear()
        self._abort(self._inbox.give_up(failure), failure)
        return failure

    def _abort(self, sequences: Iterable[Sequence], error: BaseException | None) -> None:
        for sequence in sequences:
            self._tell(sequence, sequence.abort(None if error is None else describe(error)))

    @torch.inference_mode()
    def step(self) -> StepResult | None:
        """One iteration: admit, decode, and feed prompts along. None when no row decoded.

        An exception ends the rows it met, not the engine.
        """
        started = time.perf_counter()
        self._adjust_threads()
        self._take_in()
        self._admit()
        copied = self._copy_prompts()
        chunks = self.runner.plan_prompts()
        batch = self.scheduler.decoding
        if not batch:
            self._feed(chunks)
            return None
        try:
            return self._decode(batch, started, chunks, prefilled=copied or bool(chunks))
        except Exception as error:
            log.exception("a step of %d rows failed; their requests end", len(batch))
            self._end(batch, error)
            return None

    def _adjust_threads(self) -> None:
        wanted = self._wanted_threads
        if wanted != self.num_threads:
            torch.set_num_threads(wanted)
            self.num_threads = wanted

    def _copy_prompts(self) -> bool:
        """Start the sequences that share their prompt with one that has fed it; whether there were any."""
        copied = False
        while (sequence := self.scheduler.next_prefill()) is not None:
            try:
                if not self.runner.copy_prompt(sequence):
                    break
                copied = True
            except Exception as error:
                log.exception("copying a prompt of %d tokens failed; its request ends", sequence.num_prompt_tokens)
                self._end([sequence], error)
        return copied

    def _feed(self, chunks: list[PromptChunk]) -> None:
        """Feed prompts without decoding: together, or one by one if that fails."""
        if len(chunks) > 1:
            try:
                self._start(chunks, self.runner.feed(chunks))
                return
            except Exception:
                log.exception("feeding %d prompts at once failed; they are fed one by one", len(chunks))
        for _ in chunks:
            chunk = self.runner.plan_prompts()[0]  # Rows may have moved.
            try:
                logits = self.runner.feed([chunk])
            except Exception as error:
                log.exception(
                    "feeding a prompt of %d tokens failed; its request ends", chunk.sequence.num_prompt_tokens
                )
                self._end([chunk.sequence], error)
            else:
                self._start([chunk], logits)

    def _start(self, chunks: list[PromptChunk], logits: list[torch.Tensor]) -> None:
        """Let the sequences decode whose prompts are complete. logits: after each of the chunks."""
        for chunk, last in zip(chunks, logits, strict=True):
            try:
                self.runner.start(chunk.sequence, last)
            except Exception as error:
                log.exception("the first token of a request failed; it ends")
                self._end([chunk.sequence], error)

    def _decode(self, batch: list[Sequence], started: float, chunks: list[PromptChunk], prefilled: bool) -> StepResult:
        num_held = sum(len(sequence.tokens) for sequence in batch)
        choice = self._chooser.choice_for(len(batch), with_prompts=prefilled)
        length = min(choice.speculation_length, self.config.max_speculation_length)
        outcome = self.runner.decode(batch, length, chunks)
        if outcome.prompt_logits:
            self._start(chunks, outcome.prompt_logits)
        for sequence in batch:
            if sequence.finished:
                self.scheduler.remove(sequence)
        if chunks and not outcome.prompt_logits:
            self._feed(self.runner.plan_prompts())  # Rows may have moved.
        result = StepResult(
            batch_size=len(batch),
            speculation_length=outcome.speculation_length,
            latency_s=time.perf_counter() - started,
            accepted_histogram=outcome.accepted_histogram,
            mean_context_length=num_held / len(batch),
            flags=outcome.flags | {StepFlag.PREFILL} if prefilled else outcome.flags,
        )
        self._chooser.report(choice, result)
        return result

    def _admit(self) -> None:
        for sequence in self.scheduler.admit():
            try:
                sequence.start_sampling(self.pair.vocab_size, self.pair.device)
            except Exception as error:
                log.exception("request %s cannot start; it ends", sequence.request.request_id)
                self._end([sequence], error)

    def _take_in(self) -> None:
        """Queue what was submitted and end what was aborted since the last step."""
        incoming, aborting = self._inbox.take()
        for sequences in incoming:
            self.scheduler.add(sequences)
        if aborting:
            for request_id in aborting:
                self._abort(self.scheduler.drop_waiting(request_id), None)
            self._end([s for s in self.scheduler.rows if s.request.request_id in aborting])

    def _end(self, sequences: Iterable[Sequence], error: Exception | None = None) -> None:
        """Abort sequences that have rows."""
        for sequence in list(sequences):
            if not sequence.finished:
                self._abort([sequence], error)
            if sequence in self.scheduler.rows:
                self.scheduler.remove(sequence)

    def _tell(self, sequence: Sequence, output: SequenceOutput) -> None:
        if output.finish_reason is not None:
            self._inbox.forget(sequence)
        try:
            sequence.on_output(output)
        except Exception:
            log.exception("the callback of request %s failed", sequence.request.request_id)

    def _make_sequences(self, request: GenerationRequest, on_output: OnOutput) -> list[Sequence]:
        pair, sampling = self.pair, request.sampling
        check_request(request, pair.vocab_size, self.max_context_length, self.config.max_speculation_length)
        shared = SharedPrompt() if sampling.n > 1 else None
        sequences = [
            Sequence(
                request,
                index,
                on_output,
                decode=self._decode_text[not sampling.include_special_tokens],
                eos_token_ids=pair.eos_token_ids,
                max_context_length=self.max_context_length,
                may_draft=self.draft is not None,
                shared=shared,
            )
            for index in range(sampling.n)
        ]
        need = self.scheduler.kv_need(sequences[0])
        if need > self.scheduler.max_kv_tokens:
            raise ValueError(
                f"max_tokens is {sampling.max_tokens}: with the prompt that may take {need} tokens of KV, but there are "
                f"only {self.scheduler.max_kv_tokens}"
            )
        return sequences


def describe(error: BaseException) -> str:
    """The error in a sentence for callers."""
    if isinstance(error, EngineFailedError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
