"""How much of everything `scripts/gpu_check` does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """target, draft: the pair that is timed. new_tokens: generated per prompt in every cell of the grid.

    baseline_tokens: the same by transformers, whose speed does not hang on how many there are.
    """

    target: str
    draft: str
    batch_sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    prompt_tokens: int
    timed_prompts: tuple[int, ...]  # tokens of prompts that passes are timed of
    new_tokens: int
    baseline_tokens: int
    copied_bytes: int
    pass_repeats: int
    serving_s: float
    num_checked: int  # requests of the correctness checks
    num_flat: int  # requests during which memory must not grow
    tracks: tuple[str, ...]  # that are served
    compare: str  # policies that serve them
    serve_flags: tuple[str, ...]  # of `speclen bench serve`, how long


FULL = Sizes(
    target="bundled:target-6.7b",
    draft="bundled:draft-125m",
    batch_sizes=(1, 2, 4, 8, 16, 32),
    lengths=tuple(range(9)),
    prompt_tokens=128,
    timed_prompts=(10, 130, 250),
    new_tokens=128,
    baseline_tokens=32,
    copied_bytes=4 << 30,
    pass_repeats=100,
    serving_s=20.0,
    num_checked=48,
    num_flat=400,
    tracks=("mixed", "copying", "time-varying"),
    compare="adaptive,fixed:0-8,n-gram",
    serve_flags=("--minutes", "10"),
)

# Everything once and small, on any CPU.
DRY = Sizes(
    target="bundled:target",
    draft="bundled:draft",
    batch_sizes=(1, 2),
    lengths=(0, 2),
    prompt_tokens=16,
    timed_prompts=(20,),
    new_tokens=12,
    baseline_tokens=12,
    copied_bytes=32 << 20,
    pass_repeats=3,
    serving_s=2.0,
    num_checked=6,
    num_flat=12,
    tracks=("copying", "mixed", "time-varying"),
    compare="adaptive,fixed:0-1,n-gram",
    # A capacity that is given makes the same few requests on every machine.
    serve_flags=(
        *("--quick", "--repeats", "1", "--block-s", "1", "--learn-s", "1"),
        *("--capacity", "300", "--scale", "0.5"),
    ),
)
