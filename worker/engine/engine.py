"""The engine: continuous batching with one speculative step per iteration.

The life of a request: `submit` checks it and puts its sequences in the inbox; `step` gives them rows and lets all decoding
rows take one speculative step together, in which prompts are fed along in chunks; every new token goes to the request's
callback; a finished row is free before the next step. One thread calls `run` (or `step`); everything else may be called
from any.

What fails. A step that fails is run again in parts, and a part that fails ends its own requests: `_run_and_commit`.

What is promised. Greedy output is what the target alone writes, and sampled output follows the target's distribution,
whatever is drafted and whoever shares the batch. A request with a seed gives the same tokens alone and in any batch, at any
speculation lengths: its noise goes by seed, sequence and position only. Both hold as far as the arithmetic allows: sums
depend on the shape of a product in their last bits, so two tokens whose logits (with noise, where sampled) agree to
about 1e-5 in float32 may change places. In 16 bits such near ties are common enough that outputs of different batches
drift apart after some tens to hundreds of tokens, with and without speculation, as in any batching engine.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from speclen.worker.drafting.copying import PastOutputs, Reading
from speclen.worker.drafting.plan import Plan
from speclen.worker.engine.config import EngineConfig
from speclen.worker.engine.copies import READ_ROWS, find_copies, read_ends, read_texts
from speclen.worker.engine.inbox import Inbox
from speclen.worker.engine.length_chooser import LengthChoice, LengthChooser, StepResult
from speclen.worker.engine.outbox import Outbox, Totals, describe
from speclen.worker.engine.preparation import PreparedPair, prepare
from speclen.worker.engine.scheduler import Scheduler
from speclen.worker.engine.step_plan import PromptChunk, StepPlan, plan_lengths, rows_by_class
from speclen.worker.engine.step_runner import StepRunner, StepTokens
from speclen.worker.models.loading import ModelPair
from speclen.worker.requests.detokenize import make_decode
from speclen.worker.requests.request import EngineFailedError, GenerationRequest, TokenLogprobs
from speclen.worker.requests.sequence import OnOutput, SequenceState, make_sequences
from speclen.worker.requests.validation import check_request
from speclen.worker.reviewing.reviewer import Reviewer

__all__ = ["Engine", "EngineConfig", "EngineLoad"]

log = logging.getLogger(__name__)

GRAMMAR_SHARE = 0.25  # of what else a step takes: the masks of its grammars are counted up to that

# Steps without drafts and copies after one in which they failed: else every step might be taken twice.
PLAIN_STEPS = 256

# Tokens of output that are read before it is told what they were: such a report is larger, and takes longer to learn from.
READ_TOGETHER = 256


@dataclass(slots=True)
class EngineLoad(Totals):
    """What the engine is doing, and its totals. num_kv_tokens_*: of KV, as held by the rows and as fits at most.

    num_looked_up_tokens: of prompts, looked for among what is remembered; num_reused_tokens: that were, and were not fed.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_kv_tokens_used: int = 0
    num_kv_tokens_total: int = 0
    num_looked_up_tokens: int = 0
    num_reused_tokens: int = 0


class Engine:
    """Serves a pair of models. prepared: what `prepare` gave for them; None: made here.

    Raises ModelError when a model cannot be served exactly.
    """

    def __init__(
        self, pair: ModelPair, config: EngineConfig, chooser: LengthChooser, prepared: PreparedPair | None = None
    ) -> None:
        self.pair = pair
        self.config = config
        self._chooser = chooser
        self._reading = Reading()  # what is not told yet of what rows' indexes have read
        self._draft_prompt_s = 0.0  # not told yet
        self._num_plain_steps = 0  # to come, whatever is chosen
        shared = config.max_shared_tokens if config.max_copied_tokens else 0
        self._past = PastOutputs(shared) if shared else None
        self.num_threads = self._wanted_threads = torch.get_num_threads()  # on a CPU
        prepared = prepared or prepare(pair, config)
        self.backend = prepared.backend
        self.target, self.draft = prepared.target, prepared.draft
        self.max_batch_size = prepared.max_batch_size
        self.max_context_length = prepared.max_context_length
        self.scheduler = Scheduler(
            self.target.pool,
            self.draft.pool if self.draft is not None else None,
            prepared.max_batch_size,
            prepared.max_kv_tokens,
            slack=config.max_proposed_tokens,
            vocab_size=pair.vocab_size,
            prefill_chunk=config.prefill_chunk,
        )
        generator = torch.Generator(pair.device)
        generator.seed() if config.seed is None else generator.manual_seed(config.seed)
        self.runner = StepRunner(self.target, self.draft, config.prefill_chunk, generator)
        # Where rows may copy from others' outputs, too, one output does not tell what they would have.
        self._reviewer = None if shared else Reviewer(self.target, self.draft, config.prefill_chunk, pair.vocab_size)
        self._decode_text = {skip: make_decode(pair.tokenizer, skip) for skip in (True, False)}
        self._inbox = Inbox()
        self._outbox = Outbox(self._inbox.forget, config.max_speculation_length + config.max_copied_tokens)

    @property
    def _reads_texts(self) -> bool:
        return getattr(self._chooser, "reads_texts", False)

    # Called from any thread.

    def check(self, request: GenerationRequest) -> None:
        """Raises ValueError naming the field that no request to this engine may have."""
        limits = self.max_context_length, self.config.max_speculation_length
        check_request(request, self.pair.vocab_size, *limits, self.pair.eos_token_ids)

    def submit(self, request: GenerationRequest, on_output: OnOutput) -> None:
        """Take all sequences of a request. Raises as `sequences` and `take`."""
        self.take(list(self.sequences(request, on_output)))

    def sequences(self, request: GenerationRequest, on_output: OnOutput) -> Iterator[SequenceState]:
        """Make the sequences of a request one by one. Raises ValueError naming the field.

        on_output is called from the engine's thread and must not block.
        """
        self.check(request)
        for sequence in make_sequences(
            request,
            on_output,
            decode=self._decode_text[not request.sampling.include_special_tokens],
            eos_token_ids=self.pair.eos_token_ids,
            max_context_length=self.max_context_length,
            draft_context_length=0 if self.draft is None else self.draft.max_context_length,
        ):
            self.scheduler.check_fits(sequence)
            yield sequence

    def take(self, sequences: Sequence[SequenceState]) -> None:
        """Let sequences of one request wait for rows, first come first served.

        Raises DrainingError, EngineFailedError, or ValueError for an id that another request has.
        """
        self._inbox.put(sequences)

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

    def use_chooser(self, chooser: LengthChooser) -> None:
        """Take lengths from another chooser from now on, and tell it of the steps. To be called while nothing runs."""
        self._chooser, self._reading = chooser, Reading()

    def load(self) -> EngineLoad:
        """A snapshot; its numbers may be of neighbouring steps."""
        return EngineLoad(
            **asdict(self._outbox.totals),
            num_running=len(self.scheduler.rows),
            num_waiting=self._inbox.num_incoming + self.scheduler.num_waiting,
            num_kv_tokens_used=self.scheduler.num_kv_tokens(),
            num_kv_tokens_total=self.scheduler.max_kv_tokens,
            num_looked_up_tokens=self.target.pool.num_looked_up_tokens,
            num_reused_tokens=self.target.pool.num_reused_tokens,
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
                stopping = self._inbox.wait(busy=not self.scheduler.is_idle)
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
        self._outbox.abort(unfinished, error)

    def _fail(self, error: BaseException) -> EngineFailedError:
        """Tell every request that the engine has ended; whatever else is wrong must not keep it from that."""
        log.critical("the engine ends", exc_info=error)
        failure = EngineFailedError(f"the engine has ended ({describe(error)}): start the worker again")
        failure.__cause__ = error
        self.scheduler.rows.clear()
        self.scheduler.waiting.clear()
        self._outbox.abort(self._inbox.give_up(failure), failure)
        return failure

    @torch.inference_mode()
    def step(self) -> StepResult | None:
        """One iteration: give rows, let those that decode take a step, and feed prompts along. None when no row decoded."""
        started = time.perf_counter()
        self._adjust_threads()
        self._take_in()
        plan, choice = self._schedule()
        if not plan.sequences:
            return None
        result = self._run_and_commit(plan, started)
        if result is not None:
            self._chooser.report(choice, result)
        return result

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
                self._wanted_threads = self.num_threads  # not before every step again
                for model in models:  # one of them may have changed
                    with contextlib.suppress(Exception):
                        model.use_threads(self.num_threads)

    def _take_in(self) -> None:
        """Queue what was submitted and end what was aborted since the last step."""
        incoming, aborting = self._inbox.take()
        self.scheduler.add(incoming)
        if aborting:
            for request_id in aborting:
                self._outbox.abort(self.scheduler.drop_waiting(request_id))
            self._end([s for s in self.scheduler.rows if s.request.request_id in aborting])

    def _schedule(self) -> tuple[StepPlan, LengthChoice]:
        """Give rows, and decide what the next step runs; with the choice that its lengths follow."""
        num_before = len(self.scheduler.rows)
        for sequence, error in self.scheduler.admit():
            log.error("request %s cannot start; it ends", sequence.request.request_id, exc_info=error)
            self._outbox.abort([sequence], error)
        new = self.scheduler.rows[num_before:]
        copied = self._start_copies()
        num_new_rows = sum(sequence not in copied for sequence in new)  # the others have begun, and wait for nothing
        rows, chunks = self.scheduler.decoding, self.scheduler.next_prompts()
        prefilled = bool(copied or chunks)
        choice = self._chooser.choice_for(len(rows), prefilled, rows_by_class(rows)) if rows else LengthChoice(0)
        wanted = (choice.plan or Plan(choice.speculation_length)).within(
            self.config.max_speculation_length, self.config.max_copied_tokens
        )
        copies = None
        read: tuple[tuple[int, int, int], ...] = ()
        if wanted.copies or self._reads_texts:
            most_rows = None if wanted.copies else READ_ROWS
            read_texts(rows, [chunk.sequence for chunk in chunks], self._reading, most_rows, self._past)
            if rows and self._reading.num_tokens >= READ_TOGETHER:  # without rows nothing is reported
                read, self._reading = self._reading.counts, Reading()
        if wanted.copies:
            copies = find_copies(rows, wanted, self.target.max_context_length)
        lengths = plan_lengths(rows, wanted.draft_length, (self.draft or self.target).max_context_length, copies)
        plan = StepPlan(
            rows,
            self.scheduler.num_drafting,
            lengths,
            chunks,
            prefilled,
            drafts=wanted.draft_length > 0,
            copies=copies,
            read=read,
            num_new_rows=num_new_rows,
        )
        if rows and self._num_plain_steps:
            self._num_plain_steps -= 1
            plan = plan.plainly()
        return plan, choice

    def _start_copies(self) -> list[SequenceState]:
        """Start the sequences that share their prompt with one that has fed it; those that have their first token."""
        copied: list[SequenceState] = []
        while (pair := self.scheduler.next_copy()) is not None:
            sequence, source = pair
            try:
                ids, logprobs = self.runner.copy_prompt(sequence, source)
            except Exception as error:
                log.exception("copying a prompt of %d tokens failed; its request ends", sequence.num_prompt_tokens)
                self._end([sequence], error)
            else:
                self._outbox.hand_out(sequence, ids, logprobs)
                self.scheduler.settle([sequence])
                copied.append(sequence)
        return copied

    def _run_and_commit(self, plan: StepPlan, started: float) -> StepResult | None:
        """Run a plan, hand out its tokens and settle the rows; None when no row decoded.

        A plan that fails is run again in parts: the rows must not suffer from the prompts, nor these from each other, and
        what is proposed for them may fail without them. A part that fails ends its requests, not the engine. Every try makes
        its rules and its batch anew, and finds the rows where they are by then; its time is its own.
        """
        try:
            tokens = self.runner.run(plan)
        except Exception as error:
            if len(parts := plan.apart()) > 1:
                log.exception(
                    "%d rows and %d prompts failed together; they run apart", len(plan.rows), len(plan.chunks)
                )
                results = [self._run_and_commit(part, time.perf_counter()) for part in parts]
                return results[0]
            if plan.proposes:
                self._num_plain_steps = PLAIN_STEPS
                log.exception(
                    "what was proposed for %d rows failed; they go on without for %d steps", len(plan.rows), PLAIN_STEPS
                )
                self._run_and_commit(plan.plainly(), time.perf_counter())
                return None  # what a step takes is not what this one took
            log.exception("a step of %d rows and %d prompts failed; it ends them", len(plan.rows), len(plan.chunks))
            self._end(plan.sequences, error)
            return None
        return self._commit(plan, tokens, started)

    def _commit(self, plan: StepPlan, tokens: StepTokens, started: float) -> StepResult | None:
        """Hand out the tokens of a step, and settle who has which row; what the step was worth, None when no row decoded."""
        mean_context_length = sum(len(row.tokens) for row in plan.rows) / max(1, len(plan.rows))
        self._outbox.count_step(plan.rows, plan.draft_lengths, plan.num_copied)
        new = zip(plan.sequences, tokens.ids, tokens.logprobs, strict=True)
        kept = [self._hand_out(sequence, ids, logprobs) for sequence, ids, logprobs in new if ids is not None]
        self._feed_draft(plan.chunks)
        read_ends(plan.rows, self._reading, self._past)
        ended = time.perf_counter()
        reviews = (
            () if self._reviewer is None or not self._reads_texts else self._reviewer.review(plan.rows, ended - started)
        )
        aside_s = time.perf_counter() - ended + beyond_usual_s(plan.sequences, ended - started)
        self.scheduler.settle([chunk.sequence for chunk in plan.chunks] + plan.rows)
        if not plan.rows:
            return None
        prompt_s, self._draft_prompt_s = self._draft_prompt_s, 0.0
        kept = kept[: len(plan.rows)]
        drafted, copying = kept, None
        if plan.copies is not None:
            drafted = [number - copied for number, copied in zip(kept, plan.copies.accepted(kept), strict=True)]
            copying = plan.copies.report(kept, plan.draft_lengths, self.target.ragged)
        return StepResult(
            batch_size=len(plan.rows),
            speculation_length=plan.speculation_length,
            latency_s=time.perf_counter() - started - aside_s,
            accepted_histogram=plan.histogram(drafted),
            mean_context_length=mean_context_length,
            flags=frozenset(tokens.flags | plan.flags),
            class_histograms=plan.class_histograms(drafted),
            copying=copying,
            read=plan.read,
            draft_prompt_s=prompt_s,
            reviews=reviews,
            num_new_rows=plan.num_new_rows,
            num_idle_rows=plan.num_idle_rows,
        )

    def _hand_out(self, sequence: SequenceState, ids: list[int], logprobs: list[TokenLogprobs] | None) -> int:
        """As Outbox.hand_out. A row that got no token is tried again without proposals: one of these may be why."""
        if not ids and sequence.num_output_tokens and sequence.may_propose:
            log.warning("request %s goes on without proposals: its logits were NaN", sequence.request.request_id)
            sequence.go_on_plainly()
            self.target.pool.clear_beyond(sequence.row, sequence.target_length)
            return 0
        return self._outbox.hand_out(sequence, ids, logprobs)

    def _feed_draft(self, chunks: Sequence[PromptChunk]) -> None:
        """Feed the draft the step's prompts. What fails here costs nobody a token: the draft is behind until it is asked."""
        try:
            self._draft_prompt_s += self.runner.feed_draft_prompts(chunks)
        except Exception:
            log.exception("the draft was not fed %d prompts; it catches up when it is to draft", len(chunks))

    def _end(self, sequences: Iterable[SequenceState], error: BaseException | None = None) -> None:
        """Abort sequences that have rows. error: None when somebody asked for it."""
        sequences = list(sequences)
        self._outbox.abort(sequences, error)
        self.scheduler.settle(sequences)


def beyond_usual_s(sequences: Iterable[SequenceState], step_s: float) -> float:
    """Seconds of a step that say nothing of the machine: what masks of grammars took beyond their usual share of it.

    What they usually take is a reason for shorter drafts; a grammar that is made to take long must not teach everybody.
    """
    spent_s = sum(one.sampling.grammar.take_spent_s() for one in sequences if one.sampling.grammar is not None)
    return max(0.0, spent_s - GRAMMAR_SHARE * (step_s - spent_s))
