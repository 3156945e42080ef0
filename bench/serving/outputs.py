"""Check that outputs are the same under every policy.

Each request has a seed, so every policy must generate the same tokens. Where two outputs diverge, the target alone, in
float32 and one token at a time, gives the logits of both tokens, noise included. The last bits of 16-bit arithmetic depend
on the batch, so two tokens of nearly equal logits are a tie; any other difference is a wrong output and ends the
comparison with an error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from speclen.bench.serving.load import Prompt, RequestOutcome
from speclen.bench.serving.traffic import Arrival

# How far below the best token, in logits, a token of a tie may lie, by dtype: at least, and as a share of the largest
# logit. Differences of bfloat16's top logits deviate from float32's by 0.5% of that (root mean square; 0.02 of 5 in the
# bundled target, 0.11 of 21 in SmolLM2-135M), and in the tail of some ten thousand comparisons by eight times that.
TIES = {"float32": (1e-3, 0.0), "float16": (0.06, 0.005), "bfloat16": (0.35, 0.04)}
MAX_EXAMINED = 120  # diverging outputs that are judged in one run; more are sampled by seed


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference of two outputs of one request: both begin with `prefix`, then have one of `tokens`."""

    policies: tuple[str, str]
    prompt: Prompt
    prefix: tuple[int, ...]
    tokens: tuple[int, int]
    temperature: float
    sampling_seed: int


# The bundled targets with a size in their name are this one widened without changing its function (logits agree to 2e-5),
# so it can speak for them, at a hundredth of the cost.
SMALL_TWIN = "bundled:target"

# Gap in logits between the best token and the worse of a parting's two tokens, noise included; and the largest logit.
Judge = Callable[[Parting], tuple[float, float]]


@dataclass(slots=True)
class OutputCheck:
    """Compared outputs of a whole run. num_compared: pairs with the first policy; num_same: pairs equal in every token."""

    num_compared: int = 0
    num_same: int = 0
    num_greedy_parted: int = 0
    partings: list[Parting] = field(default_factory=list)
    _first: tuple[str, Sequence[Arrival], Sequence[RequestOutcome]] | None = None

    def add(
        self, name: str, arrivals: Sequence[Arrival], prompts: Sequence[Prompt], outcomes: Sequence[RequestOutcome]
    ) -> None:
        """Compare a policy's outputs of a block with those of the block's first policy; failed requests are skipped.

        The policies of one block are added one after the other, each with the same arrivals.
        """
        if self._first is None or self._first[1] is not arrivals:
            self._first = (name, arrivals, outcomes)
            return
        first, _, reference = self._first
        for arrival, prompt, a, b in zip(arrivals, prompts, reference, outcomes, strict=True):
            if a.error or b.error:
                continue
            self.num_compared += 1
            if a.output_ids == b.output_ids:
                self.num_same += 1
                continue
            self.num_greedy_parted += arrival.temperature == 0
            self.partings.append(parting((first, name), arrival, prompt, a.output_ids, b.output_ids))

    def verdict(self, judge: Judge, dtype: str, seed: int = 0) -> dict[str, Any]:
        """Summary for the results. Raises ValueError if an output is wrong."""
        chosen = self.partings
        if len(chosen) > MAX_EXAMINED:
            chosen = random.Random(seed).sample(chosen, MAX_EXAMINED)
        least, share = TIES[dtype]
        misses = [0.0]
        for one in chosen:
            miss, largest = judge(one)
            misses.append(miss)
            if miss > (tie := max(least, share * abs(largest))):
                raise ValueError(
                    f"policies {' and '.join(one.policies)} generated different tokens where there is no tie: after "
                    f"{len(one.prefix)} tokens one lies {miss:.2g} logits below the target's choice, over {tie:.2g}"
                )
        return {
            "num_compared": self.num_compared,
            "num_same": self.num_same,
            "num_greedy_parted": self.num_greedy_parted,
            "num_parted": len(self.partings),
            "num_examined": len(chosen),
            "worst_miss_logits": max(misses),
            "tie_logits": least,
            "tie_share_of_logit": share,
        }


def parting(
    policies: tuple[str, str], arrival: Arrival, prompt: Prompt, first: Sequence[int], second: Sequence[int]
) -> Parting:
    """The parting of two unequal outputs. Raises ValueError if one is a prefix of the other."""
    place = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    if place is None:
        raise ValueError(
            f"policies {' and '.join(policies)} generated {len(first)} and {len(second)} tokens for one request"
        )
    tokens = (first[place], second[place])
    return Parting(policies, prompt, tuple(first[:place]), tokens, arrival.temperature, arrival.sampling_seed)


def target_alone(target: str) -> Judge:
    """A judge: the target in float32 on the CPU, without engine, cache or batch."""
    import torch  # imported here, since it takes seconds

    from speclen.worker.models.loading import load_pair
    from speclen.worker.sampling.noise import exponential, make_key

    pair = load_pair(SMALL_TWIN if target.startswith(SMALL_TWIN) else target, None, "cpu", "float32")

    @torch.inference_mode()
    def judge(one: Parting) -> tuple[float, float]:
        ids = torch.tensor([[*one.prompt, *one.prefix]])
        logits = pair.target(input_ids=ids, use_cache=False).logits[0, -1].float()
        largest = logits.max()
        if one.temperature:
            key = torch.tensor([make_key(one.sampling_seed, 0)])
            noise = exponential(key, torch.tensor([[len(one.prefix)]]), logits.shape[0])[0, 0]
            # Sampling takes the largest probability / noise; in units of logits that is scaled by the temperature.
            logits = logits - one.temperature * noise.log()
        return float(logits.max() - logits[list(one.tokens)].min()), float(largest)

    return judge
