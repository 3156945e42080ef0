"""Off-policy evaluation of finished outputs: how many steps every arm would have taken.

The output does not depend on what was drafted. So the steps of any arm follow from the n-gram proposals at each token, and
from the tokens on which the draft model agrees. Counting takes some 0.1 ms per 64 tokens and 18 arms.

Steps of one arm are a biased sample for another: n-gram steps end where n-grams were wrong, and requests that an arm
finishes quickly appear in few of its steps. A whole output is not biased. Evaluating it takes one forward pass of the draft
model between two steps, below 1% of the time, and never longer than a step or two: of a long output only a part is
evaluated. The other outputs are evaluated for n-grams alone, which needs no forward pass. With 16 chat requests at a time,
one output in eight was evaluated for all arms.

Outputs are chosen at random with equal probability. Evaluating whenever there is time would favour long outputs, whose
own steps earn the time.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from speclen.records import MAX_EVALUATIONS, Limits, OutputEvaluation
from speclen.worker.backends.passes import PassModel, PassPart, StepRows
from speclen.worker.requests.ngrams import LEAST_BESIDE_DRAFT, NgramIndex
from speclen.worker.requests.sequence import SequenceState
from speclen.worker.sampling.rules import DRAFT_CANDIDATES, choices_of, distributions_of

log = logging.getLogger(__name__)

# Share of step time for full evaluations, the smaller one after MANY of them; share for evaluations of n-grams alone.
SHARE, MANY, LATER_SHARE, NGRAM_SHARE = 0.006, 300, 0.0025, 0.002
MAX_CREDIT_S = 0.05  # largest saved budget, and largest debt
REMEMBERED = 50.0  # outputs in the averages of output time and evaluation time
MAX_S = 0.05  # longest delay by one evaluation, unless the step before took longer
MIN_TOKENS = 8  # outputs with fewer tokens are not worth an evaluation
MAX_EVALUATED = 1024  # tokens of one output
FIRST_TOKENS = 64  # the same, while the time per token is unknown
PACE_FORGETS = 0.9  # factor on that time when it forbids an evaluation, in case it was an outlier
NGRAMS_ALONE = Limits(1, 0, ngram=True)
SIZES = 32  # passes process a multiple of this many tokens
MAX_LOGITS = 2**22  # numbers in the logits of one pass: 16 MB
MAX_TOKENS = 8192  # prompt and output: longer ones would delay other requests


class EvaluatedTokens(NamedTuple):
    """Proposals at each evaluated token, as if it were the next one to generate.

    proposed: length of the n-gram proposal. right: length of its accepted prefix. drafted: number of consecutive tokens,
    from this one on, that the draft model would have proposed.
    """

    proposed: list[int]
    right: list[int]
    drafted: list[int]


def count_steps(tokens: EvaluatedTokens, limits: Limits) -> Iterator[tuple[int, ...]]:
    """Numbers of steps, of steps that draft, and of verified tokens, each a list in the order of `Limits.arms`.

    Steps through the tokens under every arm. Each step advances by its accepted run and one more token.
    """
    lengths = range(limits.max_speculation_length + 1)
    counts = [_without_ngrams(tokens.drafted, length) for length in lengths]
    if limits.ngram:
        counts += [_with_ngrams(tokens, length) for length in lengths]
    return zip(*counts, strict=True)


def _without_ngrams(drafted: list[int], length: int) -> tuple[int, int, int]:
    """Steps, steps that draft, and verified tokens."""
    end = len(drafted)
    if not length:
        return end, 0, end
    at = steps = 0
    while at < end:
        run = drafted[at]
        at += (run if run < length else length) + 1
        steps += 1
    return steps, steps, steps * (length + 1)


def _with_ngrams(tokens: EvaluatedTokens, length: int) -> tuple[int, int, int]:
    proposed, right, drafted = tokens
    end, least = len(proposed), LEAST_BESIDE_DRAFT if length else 1
    at = others = matches = verified = 0
    while at < end:
        number = proposed[at]
        if number >= least:
            matches += 1
            verified += number
            at += right[at] + 1
        else:
            others += 1
            run = drafted[at]
            at += (run if run < length else length) + 1
    return matches + others, others if length else 0, verified + matches + others * (length + 1)


def evaluate_ngrams(tokens: Sequence[int], first: int) -> tuple[list[int], list[int]]:
    """`proposed` and `right` of EvaluatedTokens for the tokens from place `first` on."""
    index, proposed, right = NgramIndex(), [], []
    index.extend(tokens, first)
    for place in range(first, len(tokens)):
        ids = index.propose()
        proposed.append(len(ids))
        right.append(_num_alike(ids, tokens, place))
        index.extend(tokens, 1)
    return proposed, right


def _num_alike(ids: list[int], tokens: Sequence[int], place: int) -> int:
    """Length of the longest prefix of ids that matches the tokens from a place on."""
    number, end = 0, len(tokens)
    for token in ids:
        if place >= end or tokens[place] != token:
            break
        number += 1
        place += 1
    return number


def runs_of(chosen: Sequence[bool]) -> list[int]:
    """Length of the run of True values that begins at each place."""
    runs, run = [0] * len(chosen), 0
    for at in range(len(chosen) - 1, -1, -1):
        run = run + 1 if chosen[at] else 0
        runs[at] = run
    return runs


@dataclass
class Spent:
    """Time budget of one kind of evaluation. credit_s: saved time, negative if overdrawn. mean_s: of an evaluation."""

    credit_s: float = 0.0
    number: int = 0
    mean_s: float = 0.0

    def earn(self, seconds: float) -> None:
        """Add to the budget."""
        self.credit_s = min(self.credit_s + seconds, MAX_CREDIT_S)

    def pay(self, seconds: float) -> None:
        """Charge one evaluation to the budget."""
        self.number += 1
        self.credit_s -= seconds
        self.mean_s += (seconds - self.mean_s) / min(self.number, REMEMBERED)


class Evaluator:
    """Evaluates some of the finished outputs for every arm within the limits.

    draft: None if nothing can be drafted. prefill_chunk: largest number of tokens in a forward pass.
    """

    def __init__(
        self, target: PassModel, draft: PassModel | None, limits: Limits, prefill_chunk: int, vocab_size: int
    ) -> None:
        self._target, self._draft, self._limits = target, draft, limits
        self._prefill_chunk, self._chunk = prefill_chunk, max(SIZES, min(prefill_chunk, MAX_LOGITS // vocab_size))
        # Generators of its own, so that outputs do not depend on evaluations.
        self._generator, self._random = torch.Generator().manual_seed(0), random.Random(0)
        self._wholes, self._ngrams = Spent(), Spent()
        self._step_s = self._num_ended = 0.0  # time of recent steps, and number of outputs that ended in them
        self._token_s: dict[PassModel, float] = {}  # seconds per token in an evaluation's passes
        self._works = limits.max_speculation_length > 0 or limits.ngram  # otherwise there is only one arm

    def evaluate(
        self, rows: Sequence[SequenceState], step_s: float, on_start: Callable[[], None] = lambda: None
    ) -> tuple[OutputEvaluation, ...]:
        """Evaluate at most one of the outputs that have just ended in full, and others for n-grams alone.

        rows: sequences of the step, before finished ones lose their slots. step_s: time of the step. on_start: called before
        a forward pass, which delays all sequences. A failure is logged and turns evaluation off.
        """
        share = SHARE if self._wholes.number < MANY else LATER_SHARE
        self._wholes.earn(share * step_s)
        self._ngrams.earn(NGRAM_SHARE * step_s)
        self._step_s += step_s
        ended = [row for row in rows if row.finished and can_evaluate(row)] if self._works else []
        if not ended:
            return ()
        output_s = self._time_of_one(len(ended))
        drawn = self._drawn(ended, self._wholes, share * output_s)
        row = self._random.choice(drawn) if drawn else None
        found = self._whole(row, step_s, on_start) if row is not None else ()
        others = self._drawn(ended, self._ngrams, NGRAM_SHARE * output_s) if self._limits.ngram else []
        for other in [other for other in others if other is not row or not found][: MAX_EVALUATIONS - len(found)]:
            found += self._timed(self._ngrams, self._ngrams_of, other)
        return found

    def _drawn(self, ended: list[SequenceState], spent: Spent, affordable_s: float) -> list[SequenceState]:
        """Outputs drawn for evaluation with equal probability. affordable_s: budget per output that ends."""
        chance = affordable_s / max(spent.mean_s, 1e-9)
        return [row for row in ended if self._random.random() < chance] if spent.credit_s > -MAX_CREDIT_S else []

    def _whole(self, row: SequenceState, step_s: float, on_start: Callable[[], None]) -> tuple[OutputEvaluation, ...]:
        """Evaluate an output for every arm, if the time suffices."""
        window = self._window(row, max(MAX_S, step_s))
        if window is None:
            self._token_s = {model: PACE_FORGETS * token_s for model, token_s in self._token_s.items()}
            return ()
        on_start()
        return self._timed(self._wholes, self._evaluate, row, *window)

    def _timed(self, spent: Spent, evaluate: Callable[..., OutputEvaluation], *of: Any) -> tuple[OutputEvaluation, ...]:
        started = time.perf_counter()
        try:
            evaluation = evaluate(*of)
        except Exception:
            log.exception("outputs cannot be evaluated: acceptance is learned from steps alone")
            self._works = False
            return ()
        spent.pay(time.perf_counter() - started)
        return (evaluation,)

    def _time_of_one(self, num_ended: int) -> float:
        """Mean step time per output that ends. num_ended: outputs that end in this step."""
        self._num_ended += num_ended
        output_s = self._step_s / self._num_ended
        keep = max(0.0, 1.0 - num_ended / REMEMBERED)
        self._step_s *= keep
        self._num_ended *= keep
        return output_s

    def _window(self, row: SequenceState, max_s: float) -> tuple[int, int] | None:
        """Bounds of a part of the output whose evaluation takes at most max_s; None if it would be too short.

        The part begins at a random place, since beginnings and ends differ from the rest.
        """
        begin, end = row.num_prompt_tokens + 1, len(row.tokens)
        num_tokens = min(end - begin, MAX_EVALUATED)
        if any(model not in self._token_s for model, _ in self._passes(row, begin, end)):
            num_tokens = min(num_tokens, FIRST_TOKENS)
        while num_tokens >= MIN_TOKENS:
            first = self._random.randint(begin, end - num_tokens)
            passes = self._passes(row, first, first + num_tokens)
            if sum(self._token_s.get(model, 0.0) * number for model, number in passes) <= max_s:
                return first, first + num_tokens
            num_tokens //= 2
        return None

    def _passes(self, row: SequenceState, first: int, stop: int) -> list[tuple[PassModel, int]]:
        """The models that an evaluation of this part needs, with the number of tokens that each processes."""
        if self._draft is None or not row.may_draft:
            return []
        passes = [(self._draft, stop - 1 - min(row.draft_length, first - 1))]
        return passes if _is_determined(row) else [*passes, (self._target, stop - first)]

    def _ngrams_of(self, row: SequenceState) -> OutputEvaluation:
        """Evaluation of an output for plain decoding and n-grams alone."""
        begin, end = row.num_prompt_tokens + 1, len(row.tokens)
        num_tokens = min(end - begin, MAX_EVALUATED)
        first = self._random.randint(begin, end - num_tokens)
        return self._counted(row, first, first + num_tokens, [False] * num_tokens, NGRAMS_ALONE)

    def _evaluate(self, row: SequenceState, first: int, stop: int) -> OutputEvaluation:
        chosen = [False] * (stop - first)
        if self._draft is not None and row.may_draft:
            chosen = self._chosen(self._draft, row, first, stop)
        return self._counted(row, first, stop, chosen, self._limits)

    @staticmethod
    def _counted(row: SequenceState, first: int, stop: int, chosen: list[bool], limits: Limits) -> OutputEvaluation:
        """The evaluation of a part. chosen: True for tokens that the draft model would have proposed."""
        ngrams = evaluate_ngrams(row.tokens[:stop], first) if limits.ngram else ([], [])
        counts = count_steps(EvaluatedTokens(*ngrams, runs_of(chosen)), limits)
        return OutputEvaluation(int(row.request_class), row.num_output_tokens - 1, stop - first, *counts)

    def _chosen(self, draft: PassModel, row: SequenceState, first: int, stop: int) -> list[bool]:
        """For each token from place `first` on: True if the draft model would have proposed it."""
        sampling, tokens = row.sampling, torch.tensor(row.tokens, device=draft.device)

        def chooses(logits: torch.Tensor, place: int) -> torch.Tensor:
            chosen = choices_of(sampling, logits, place - row.num_prompt_tokens, DRAFT_CANDIDATES)
            return chosen == tokens[place : place + len(logits)]

        def chance(logits: torch.Tensor, place: int, candidates: int | None = None) -> torch.Tensor:
            probs = distributions_of(sampling, logits, candidates)
            return probs.gather(-1, tokens[place : place + len(logits), None])[:, 0]

        held, determined = min(row.draft_length, first - 1), _is_determined(row)
        drafted = chooses if determined else partial(chance, candidates=DRAFT_CANDIDATES)
        same = self._of_tokens(draft, row, held, first, stop, 0, drafted)
        row.draft_length = max(row.draft_length, stop - 1)
        if not determined:
            # Given the output token, draw whether a sampled draft token would have been accepted as it.
            wanted = self._of_tokens(self._target, row, first - 1, first, stop, first - 1, chance)
            same = torch.rand(len(wanted), generator=self._generator) * wanted < same
        chosen: list[bool] = same.tolist()
        return chosen

    def _of_tokens(
        self,
        model: PassModel,
        row: SequenceState,
        held: int,
        first: int,
        stop_at: int,
        least: int,
        what: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> torch.Tensor:
        """Apply a function to the logits before each token of places first to stop_at - 1. Returns values [n], on the CPU.

        held: tokens in the model's KV cache. what: function of logits [n, vocab] and the place of the first token after
        them. Some tokens are processed again, so that passes have few sizes, since a new size takes longer; but none before
        place `least`, since other sequences may share the keys and values of the prompt.
        """
        end, found, started, num_processed = stop_at - 1, [], time.perf_counter(), stop_at - 1 - held
        while held < end:
            alone = held < first - 1 and end - held > self._chunk  # catch up before the wanted logits
            stop = min(first - 1, held + self._prefill_chunk) if alone else min(end, held + self._chunk)
            begin = min(held, max(least, stop - rounded_up(stop - held)))
            num_wanted = max(0, stop - max(held, first - 1))
            rows = StepRows(np.array([begin]), stop - begin, model.device, first_row=row.row)
            ids = torch.tensor([row.tokens[begin:stop]], device=model.device)
            num_logits = min(max(rounded_up(num_wanted), 1), stop - begin)
            (logits,) = model.forward([PassPart(rows, ids, num_logits)])
            if num_wanted:
                found.append(what(logits[0, -num_wanted:], stop - num_wanted + 1))
            held = stop
        values = torch.cat(found).cpu()
        token_s = (time.perf_counter() - started) / num_processed
        self._token_s[model] = (self._token_s.get(model, token_s) + token_s) / 2
        return values


def can_evaluate(row: SequenceState) -> bool:
    """True if the output ran under the table's arms, without penalties or a grammar, and is neither short nor long."""
    usual = row.may_use_ngrams and not row.sampling.looks_back
    return usual and row.row >= 0 and row.num_output_tokens > MIN_TOKENS and len(row.tokens) <= MAX_TOKENS


def _is_determined(row: SequenceState) -> bool:
    """True if the tokens are a function of the logits: greedy requests, and those with a seed."""
    return row.sampling.key is not None or row.sampling.temperature == 0


def rounded_up(num_tokens: int) -> int:
    """The number of tokens rounded up to a multiple of SIZES."""
    return -(-num_tokens // SIZES) * SIZES
