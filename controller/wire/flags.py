"""What a step may teach, by the names of its flags."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flags:
    """What the flags of a report mean: their names for the store, and what the step may still teach.

    copied: whether its plan copies; copies_teach, copies_teach_latency: what it may teach of that.
    """

    names: str
    teaches_latency: bool
    teaches_acceptance: bool
    copied: bool = False
    copies_teach: bool = False
    copies_teach_latency: bool = False


# What each flag leaves to learn: (latency, acceptance). An accepted run is an accepted run however long the step took,
# except where rows had lengths of their own: there the histogram does not say who was cut off at which length.
TEACHES = {
    "first_use": (False, True),
    "compilation": (False, True),
    "prefill": (False, True),
    "catch_up": (False, True),
    "mixed_lengths": (False, False),
    # Its time is that of unlike rows, and the rows that drafted were the ones without a match, which are not like others.
    # What it teaches of copying is told apart.
    "copied": (False, False),
    "changed_length": (False, True),
    "unknown": (False, False),  # a reason that this version does not know is still a reason
}


def named_flags(names: str) -> Flags:
    """The meaning of stored flags ("prefill catch_up"); also for a replay from the database."""
    lessons = {name: TEACHES.get(name, (False, False)) for name in names.split()}
    copied = lessons.pop("copied", None) is not None
    latency, acceptance = (all(lesson[at] for lesson in lessons.values()) for at in (0, 1))
    if not copied:
        return Flags(names, latency, acceptance)
    return Flags(names, False, False, True, acceptance, latency and acceptance)
