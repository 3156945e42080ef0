"""Tokens per step of two arms on the same text, so that their ratio does not depend on what the text was.

Evaluated outputs tell the steps of every arm. Where there are none, an accepted run of a longer draft tells the steps that
a shorter one takes through the same tokens: ceil((run + 1) / (length + 1)) of them. Steps of the arm in use cover all that
was generated, so this is exact if the longer draft is in use. Steps of a trial do not: requests whose drafts are rejected
take more steps in use, so a trial has too many of their steps and too few of their tokens. With rho the tokens of a longer
draft's step in steps of the shorter one, the trial tells the mean of rho over requests and not that of 1 / rho, which is
larger than 1 / mean by the relative variance of rho.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from speclen.controller.baseline.blocks import Plan
from speclen.records import PLAIN, Arm, StepFlag, StepRecord

Runs = Counter[int]  # sequences by accepted tokens
Sums = tuple[float, float, float, float]  # tokens and steps of sequences: of the learned arm, of the baseline
USUAL_SPREAD = 0.2  # standard deviation of log acceptance among requests before anything was seen
USUAL_STEPS = 64  # steps that it counts for
MOST_ALIKE = 8  # sequences of a step: what all have in common counts for more in larger batches


def count_runs(runs: Runs, steps: Iterable[StepRecord]) -> Runs:
    """Add the accepted runs of steps."""
    for step in steps:
        if StepFlag.MIXED_LENGTHS not in step.flags:
            for length, number in enumerate(step.accepted_histogram):
                runs[length] += number
    return runs


def tokens_of(runs: Runs) -> int:
    """Generated tokens."""
    return sum((run + 1) * number for run, number in runs.items())


def num_steps(runs: Runs, longest: int, length: int) -> float:
    """Steps of sequences that shorter drafts take through the tokens of runs of drafts of `longest` tokens.

    After a run that was accepted as a whole, the last step may go on into the next one.
    """
    size, rest = length + 1, (longest + 1) % (length + 1)
    steps = float(sum(number * -(-(run + 1) // size) for run, number in runs.items()))
    if rest and runs[longest]:
        accepted = runs[longest] / (runs[longest] + runs[longest - 1])
        chances = [accepted**run for run in range(size)]  # of the next run, modulo size
        goes_on = sum(chances[: size - rest]) / sum(chances)
        steps -= runs[longest] * accepted * goes_on
    return steps


def steepness(runs: Runs, length: int) -> float:
    """Growth of log tokens per step of drafts of this length with log acceptance."""
    reached = [sum(number for run, number in runs.items() if run >= at) for at in range(1, length + 1)]
    return sum(at * number for at, number in enumerate(reached, 1)) / (runs.total() + sum(reached))


class Spread:
    """How much requests differ in the tokens per step of one arm, by products of a trial's steps, which share requests."""

    def __init__(self) -> None:
        self._products = self._deviations = self._tokens = 0.0
        self._sequences = self._steps = 0

    def add(self, steps: Sequence[StepRecord]) -> None:
        """Learn from the steps of a trial."""
        steps = [step for step in steps if step.batch_size <= MOST_ALIKE and StepFlag.MIXED_LENGTHS not in step.flags]
        if len(steps) < 2:
            return
        self._tokens += sum(step.num_tokens for step in steps)
        self._sequences += sum(step.batch_size for step in steps)
        usual = self._tokens / self._sequences
        found = [(step.tokens_per_sequence / usual - 1.0) * step.batch_size**0.5 for step in steps]
        self._products += (sum(found) ** 2 - sum(each**2 for each in found)) / (len(found) - 1)
        self._deviations += sum(found)
        self._steps += len(found)

    def variance(self, steep: float) -> float:
        """Relative variance of tokens per step among requests. steep: of this arm."""
        products = self._products - self._deviations**2 / max(self._steps, 1)
        usual = USUAL_STEPS * (USUAL_SPREAD * steep) ** 2
        return max(products + usual, 0.0) / (self._steps + USUAL_STEPS)


def is_shorter(arm: Arm, other: Arm) -> bool:
    """True if accepted runs of the other arm tell this one's."""
    return arm == PLAIN or (not arm.ngram and not other.ngram and arm.speculation_length <= other.speculation_length)


def tells(plan: Plan, outputs: Iterable[dict[Arm, int]]) -> bool:
    """True if a trial can compare the tokens of both arms."""
    mine, its = plan.in_use, plan.tried
    return is_shorter(its, mine) or is_shorter(mine, its) or any(mine in each and its in each for each in outputs)


def compared_tokens(
    plan: Plan, used: Runs, tried: Runs, outputs: Iterable[dict[Arm, int]], spread: Spread
) -> Sums | None:
    """Tokens and steps of both arms; None if nothing tells them for the same text.

    used: accepted runs since the last trial; tried: in this one. outputs: steps by arm. spread: of the trial's arm.
    """
    known = [output for output in outputs if plan.learned in output and plan.baseline in output]
    if is_shorter(plan.tried, plan.in_use):
        mine, its = float(used.total()), steps_of(plan.tried, used, plan.in_use)
        tokens = float(tokens_of(used))
    elif known:
        tokens = float(sum(output[PLAIN] for output in known))  # a plain step generates one
        mine, its = (float(sum(output[arm] for output in known)) for arm in (plan.in_use, plan.tried))
    elif is_shorter(plan.in_use, plan.tried) and tried:
        tokens, mine = float(tokens_of(tried)), steps_of(plan.in_use, tried, plan.tried)
        steep, less = (steepness(tried, arm.max_tokens) for arm in (plan.tried, plan.in_use))
        its = tried.total() * (1.0 + spread.variance(steep) * (1.0 - less / steep) ** 2 if steep else 1.0)
    else:
        return None
    sides = ((tokens, its), (tokens, mine)) if plan.uses_baseline else ((tokens, mine), (tokens, its))
    return (*sides[0], *sides[1]) if tokens else None


def steps_of(arm: Arm, runs: Runs, longer: Arm) -> float:
    """Steps that an arm takes through the tokens of another one's runs."""
    return (
        float(tokens_of(runs)) if arm == PLAIN else num_steps(runs, longer.speculation_length, arm.speculation_length)
    )
