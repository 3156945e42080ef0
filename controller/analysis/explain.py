"""The numbers behind a choice, and the same in words: pure functions of the learned table's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speclen.records import PLAIN, Arm, ArmEstimate


@dataclass(frozen=True, slots=True)
class Change:
    """The newest change of a choice. previous_arm: None for the first choice. when: a date; "" if unknown."""

    previous_arm: Arm | None
    arm: Arm
    reason: str
    when: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The estimates of every arm at one batch size.

    context: its name. rows: the arm in use, then the others by expected ms per token. survival[i]: P(draft tokens 0..i all
    accepted).
    """

    context: str
    batch_size: int
    rows: tuple[ArmEstimate, ...]
    survival: tuple[float, ...]
    last_change: Change | None

    @property
    def chosen(self) -> ArmEstimate:
        """The row of the arm in use."""
        return self.rows[0]

    @property
    def runner_up(self) -> ArmEstimate | None:
        """The best row of another arm; None if there is no other."""
        return self.rows[1] if len(self.rows) > 1 else None


def rows_at(batch_size: int, estimates: Sequence[ArmEstimate]) -> tuple[ArmEstimate, ...]:
    """Rows of the context for an `Explanation` of one batch size. Raises ValueError if that has no arm in use."""
    rows = [row for row in estimates if row.batch_min <= batch_size <= row.batch_max]
    if not any(row.is_best for row in rows):
        raise ValueError(
            f"nothing is known about batch size {batch_size} yet: let a worker decode a few steps, or import a profile"
        )
    return tuple(sorted(rows, key=lambda row: (not row.is_best, row.ms_per_token)))


def in_words(explanation: Explanation) -> list[str]:
    """The explanation in sentences, one per entry."""
    sentences = _about_choice(explanation) + _about_runner_up(explanation) + _about_plain(explanation)
    if explanation.survival:
        shares = ", ".join(f"{100 * value:.0f}%" for value in explanation.survival)
        sentences.append(
            f"Draft tokens 1 to {len(explanation.survival)} and all before them are accepted in {shares} of steps."
        )
    change = explanation.last_change
    if change is not None:
        before = "nothing" if change.previous_arm is None else f"'{change.previous_arm}'"
        when = f" ({change.when})" if change.when else ""
        sentences.append(f"The choice last changed{when} from {before} to '{change.arm}': {change.reason}.")
    return sentences


def _about_choice(explanation: Explanation) -> list[str]:
    chosen = explanation.chosen
    low, high = chosen.batch_min, chosen.batch_max
    others = f", like every batch size of {low} to {high}" if low < high else ""
    known = f"from {chosen.num_steps} usable samples at these sizes"
    if chosen.observed_step_s is not None:
        known += f", which took {1e3 * chosen.observed_step_s:.3g} ms on average"
    return [
        f"A batch of {explanation.batch_size} uses '{chosen.arm}'{others}.",
        f"A step yields {chosen.expected_tokens:.2f} tokens per sequence in {1e3 * chosen.step_s:.3g} ms: "
        f"{chosen.ms_per_token:.4g} ms per token (95%: {chosen.ms_per_token_low:.4g} to {chosen.ms_per_token_high:.4g}), "
        f"{known}.",
    ]


def _about_runner_up(explanation: Explanation) -> list[str]:
    rival, chosen = explanation.runner_up, explanation.chosen
    if rival is None:
        return ["There is no other arm to select."]
    percent = 100.0 * (rival.ms_per_token / chosen.ms_per_token - 1.0)
    if percent < 0.0:
        return [
            f"'{rival.arm}' needs {rival.ms_per_token:.4g} ms per token, {-percent:.1f}% less, but is not used: "
            "the gain is under 0.2%, this size has few samples, or its prefill costs more."
        ]
    overlap = rival.ms_per_token_low < chosen.ms_per_token_high
    sure = "their intervals overlap, so this may still change" if overlap else "their intervals do not overlap"
    return [f"The runner-up, '{rival.arm}', needs {rival.ms_per_token:.4g} ms per token: {percent:.1f}% worse; {sure}."]


def _about_plain(explanation: Explanation) -> list[str]:
    plain = next((row for row in explanation.rows[1:] if row.arm == PLAIN), None)
    if plain is None:
        return []
    times = plain.ms_per_token / explanation.chosen.ms_per_token
    return [f"Plain decoding needs {plain.ms_per_token:.4g} ms per token: the choice is {times:.2f} times as fast."]
