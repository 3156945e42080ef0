"""Settings of a profile: the grid, and the time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from speclen.worker.models.loading import ModelPair

QUICK_LENGTHS = (0, 1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """Grid and time of a profile."""

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)  # sequences decoding in one step
    lengths: tuple[int, ...] = tuple(range(9))  # speculation lengths, 0 included
    budget_s: float = 150.0  # measuring time; loading the models comes on top
    steps_per_visit: int = 3  # steps measured at a visit; every visit costs a step or two that do not count
    prompt_tokens: tuple[int, ...] = (32, 96, 256)  # context lengths at the start of a round; cut to the models' limit
    temperature: float = 0.0  # of the sampling that survival is measured under; 0 is greedy
    seed: int = 0
    backend: str = "auto"  # of the engine, see EngineConfig
    check_models: bool = True  # False: for experiments with models whose outputs depend on the batch


def quick_settings(max_batch_size: int, max_length: int, budget_s: float) -> ProfileSettings:
    """A coarse grid up to a worker's limits: batch sizes 1, 2, 4, ..., some lengths, short contexts."""
    sizes = [1 << power for power in range(max_batch_size.bit_length()) if 1 << power <= max_batch_size]
    lengths = tuple(length for length in QUICK_LENGTHS if length <= max_length)
    return ProfileSettings(
        tuple(sorted({*sizes, max_batch_size})), lengths, budget_s, steps_per_visit=2, prompt_tokens=(32, 128)
    )


def fit_settings(pair: ModelPair, settings: ProfileSettings) -> ProfileSettings:
    """The settings with prompts that leave room in the context.

    Raises ValueError naming the setting that the pair cannot do.
    """
    if pair.draft is None and settings.lengths != (0,):
        raise ValueError("lengths over 0 need a draft; without one only length 0 can be profiled")
    context = pair.draft_context_length or pair.max_context_length
    room = context - 4 * (settings.lengths[-1] + 1)
    if room < 2:
        raise ValueError(f"length {settings.lengths[-1]} does not fit in a context of {context} tokens")
    prompts = sorted({min(tokens, room // 2) for tokens in settings.prompt_tokens})
    return replace(settings, prompt_tokens=tuple(prompts))
