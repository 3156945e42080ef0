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
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from speclen.worker.backends.captured_model import Recorder
from speclen.worker.engine.config import EngineConfig
from speclen.worker.engine.detokenize import make_decode
from speclen.worker.engine.preparation import prepare
from speclen.worker.engine.request import DrainingError, GenerationRequest, QueueFullError, SequenceOutput
from speclen.worker.engine.scheduler import Scheduler
from speclen.worker.engine.sequence import OnOutput, Sequence, SharedPrompt
from speclen.worker.engine.step_plan import PromptChunk
from speclen.worker.engine.step_runner import StepRunner
from speclen.worker.engine.steps import LengthChooser, StepFlag, StepResult
from speclen.worker.engine.validation import check_request
from speclen.worker.models.loading import ModelPair

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

        self._wakeup = threading.Condition()
        # Guarded by _wakeup:
        self._incoming: list[list[Sequence]] = []
        self._aborting: set[str] = set()
        self._unfinished: dict[str, int] = {}  # sequences left of each request
        self._draining = False
        self._stopping = False

    # Called from any thread.

    def submit(self, request: GenerationRequest, on_output: OnOutput) -> None:
        """Queue a request. on_output is called from the engine's thread and must not block.

        Raises ValueError naming the field, QueueFullError, or DrainingError.
        """
        sequences = self._make_sequences(request, on_output)
        with self._wakeup:
            if self._draining:
                raise DrainingError("the worker is draining and takes no new requests")
            if request.request_id in self._unfinished:
                raise ValueError(f"request_id {request.request_id!r} is already running: choose another")
            if len(self._incoming) + self.scheduler.num_waiting >= self.config.max_waiting:
                raise QueueFullError(f"{self.config.max_waiting} requests are waiting already: try again later")
            self._unfinished[request.request_id] = len(sequences)
            self._incoming.append(sequences)
            self._wakeup.notify()

    def abort(self, request_id: str) -> bool:
        """End a request after the running step; whether it was running or waiting."""
        with self._wakeup:
            if request_id not in self._unfinished:
                return False
            self._aborting.add(request_id)
            self._wakeup.notify()
            return True

    def drain(self) -> None:
        """Take no new requests; those accepted go on to their end."""
        with self._wakeup:
            self._draining = True

    def stop(self) -> None:
        """Let `run` return after the running step; what is unfinished is aborted."""
        with self._wakeup:
            self._draining = self._stopping = True
            self._aborting.update(self._unfinished)
            self._wakeup.notify()

    def use_threads(self, num_threads: int) -> None:
        """Compute with that many CPU threads from the next step on."""
        self._wanted_threads = num_threads

    def load(self) -> EngineLoad:
        """A snapshot; its numbers may be of neighbouring steps."""
        with self._wakeup:
            num_incoming = len(self._incoming)
        totals = self.runner.totals
        return EngineLoad(
            num_running=len(self.scheduler.rows),
            num_waiting=num_incoming + self.scheduler.num_waiting,
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
        """Step until `stop`; sleep when there is nothing to do."""
        while True:
            with self._wakeup:
                self._wakeup.wait_for(self._has_work)
                stopping = self._stopping
            try:
                self.step()
            except Exception:
                log.exception("an iteration failed outside its step; %d running requests end", len(self.scheduler.rows))
                self._end(self.scheduler.rows)
            if stopping:
                return

    def _has_work(self) -> bool:
        scheduler = self.scheduler
        return bool(self._incoming or self._aborting or self._stopping or scheduler.rows or scheduler.waiting)

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
        except Exception:
            log.exception("a step of %d rows failed; their requests end", len(batch))
            self._end(batch)
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
            except Exception:
                log.exception("copying a prompt of %d tokens failed; its request ends", sequence.num_prompt_tokens)
                self._end([sequence])
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
            except Exception:
                log.exception(
                    "feeding a prompt of %d tokens failed; its request ends", chunk.sequence.num_prompt_tokens
                )
                self._end([chunk.sequence])
            else:
                self._start([chunk], logits)

    def _start(self, chunks: list[PromptChunk], logits: list[torch.Tensor]) -> None:
        """Let the sequences decode whose prompts are complete. logits: after each of the chunks."""
        for chunk, last in zip(chunks, logits, strict=True):
            try:
                self.runner.start(chunk.sequence, last)
            except Exception:
                log.exception("the first token of a request failed; it ends")
                self._end([chunk.sequence])

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
            self._feed(chunks)
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
            sequence.start_sampling(self.pair.vocab_size, self.pair.device)

    def _take_in(self) -> None:
        """Queue what was submitted and end what was aborted since the last step."""
        with self._wakeup:
            incoming, self._incoming = self._incoming, []
            aborting, self._aborting = self._aborting, set()
        for sequences in incoming:
            self.scheduler.add(sequences)
        if aborting:
            for request_id in aborting:
                for sequence in self.scheduler.drop_waiting(request_id):
                    self._tell(sequence, sequence.abort())
            self._end([s for s in self.scheduler.rows if s.request.request_id in aborting])

    def _end(self, sequences: Iterable[Sequence]) -> None:
        """Abort sequences that have rows."""
        sequences = list(sequences)
        for sequence in sequences:
            if not sequence.finished:
                self._tell(sequence, sequence.abort())
            self.scheduler.remove(sequence)

    def _tell(self, sequence: Sequence, output: SequenceOutput) -> None:
        if output.finish_reason is not None:
            self._forget(sequence)
        try:
            sequence.on_output(output)
        except Exception:
            log.exception("the callback of request %s failed", sequence.request.request_id)

    def _forget(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        with self._wakeup:
            self._unfinished[request_id] -= 1
            if not self._unfinished[request_id]:
                del self._unfinished[request_id]
                self._aborting.discard(request_id)

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
