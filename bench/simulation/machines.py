"""Step times of simulated machines, calibrated on an H200.

own-h200.json has sums over blocks of 5 s of speclen's engine at fixed lengths and with n-grams alone. Milliseconds per step
(tokens per sequence), by number of concurrent requests:

    requests  plain   1           3           5           8           n-gram
    2         6.0     7.2 (1.9)   9.6 (2.8)   12.1 (3.3)  13.7 (3.8)  6.2 (1.8)
    4         6.5     8.8 (1.8)   11.6 (2.6)  14.6 (3.2)  17.4 (3.5)  7.3 (1.9)
    8         6.9     10.8 (1.7)  13.3 (2.5)  15.5 (2.8)  17.5 (3.0)  8.0 (1.5)

So a draft pass takes about 1.1 ms, and drafting takes another 1.1 ms per doubling of its sequences beyond two.

vllm-h200-b.json is from vLLM with a target of 6.7 B and a draft of 125 M parameters: times of blocks at fixed lengths
relative to length 3 in the same round, and absolute times of length 3 in the fast blocks. Length 5 is from recording a.
"""

from __future__ import annotations

from bisect import bisect_left
from math import log2
from typing import NamedTuple

import numpy as np


class Machine(NamedTuple):
    """Seconds that the parts of a step take at level 1.

    drafting_s: of a step that drafts, per doubling of the drafting sequences beyond two. token_s: per verified draft token;
    late_token_s: the same beyond `knee` verified tokens, where the device is compute-bound. padding: numbers of tokens with
    CUDA graphs. expert_s: per active expert, of 128 with 8 per token. context_s: per token held. cliff, cliff_s: number of
    tokens beyond which a step takes longer, and by how much.
    """

    overhead_s: float = 0.0057
    sequence_s: float = 0.00012
    pass_s: float = 0.00108
    drafting_s: float = 0.0011
    token_s: float = 0.00002
    knee: int = 1_000_000
    late_token_s: float = 0.0
    padding: tuple[int, ...] = ()
    expert_s: float = 0.0
    context_s: float = 0.0
    cliff: int = 1_000_000
    cliff_s: float = 0.0

    def step_s(self, batch: float, drafting: float, passes: float, verified: float, context: float) -> float:
        """Mean seconds of a step. passes: of the draft model; verified: tokens; context: tokens held per sequence."""
        if self.padding and verified <= self.padding[-1]:
            verified = self.padding[bisect_left(self.padding, verified)]
        seconds = self.overhead_s + self.sequence_s * batch + self.token_s * (verified - batch)
        seconds += self.late_token_s * max(0.0, verified - self.knee) + self.context_s * batch * context
        if self.expert_s:
            seconds += self.expert_s * 128 * (1.0 - (1.0 - 8 / 128) ** verified)
        if verified > self.cliff:
            seconds += self.cliff_s
        return seconds + self.pass_s * passes + self.first_pass_s(drafting) if passes else seconds

    def first_pass_s(self, drafting: float) -> float:
        """Seconds that drafting takes for this number of sequences, in addition to the draft passes."""
        return self.drafting_s * log2(max(drafting, 2.0) / 2.0)

    def slower(self, factor: float, *parts: str) -> Machine:
        """A copy of the machine in which some parts take longer, by factors."""
        return self._replace(**{part: getattr(self, part) * factor for part in parts})


class VllmMachine(NamedTuple):
    """vLLM as recorded. Step times are those of the table."""

    pass_s: float = 0.0
    context_s: float = 0.0

    def step_s(self, batch: float, drafting: float, passes: float, verified: float, context: float) -> float:
        """Mean seconds of a step."""
        return VLLM_S[int(batch)][round(passes)]

    def first_pass_s(self, drafting: float) -> float:
        """0: the recorded times include drafting."""
        return 0.0


class Levelled(NamedTuple):
    """A machine whose steps take other times by number of draft passes. factors: for 0, 1, 2, ... passes."""

    machine: AnyMachine
    factors: tuple[float, ...]
    pass_s: float = 0.0
    context_s: float = 0.0

    def step_s(self, batch: float, drafting: float, passes: float, verified: float, context: float) -> float:
        """Mean seconds of a step."""
        return self.factors[round(passes)] * self.machine.step_s(batch, drafting, passes, verified, context)

    def first_pass_s(self, drafting: float) -> float:
        """As of the machine itself."""
        return self.machine.first_pass_s(drafting)


def _recorded() -> list[list[float]]:
    """Seconds by batch size and length, interpolated, [33][9]."""
    batches, lengths, length_3_s = (1, 4, 16, 32), (0, 1, 2, 3, 5, 8), (0.0160, 0.0158, 0.0166, 0.0171)
    relative_to_3 = (
        (0.62, 0.71, 0.86, 1.0, 1.33, 1.74),
        (0.62, 0.73, 0.86, 1.0, 1.33, 1.70),
        (0.62, 0.72, 0.86, 1.0, 1.33, 1.66),
        (0.62, 0.75, 0.86, 1.0, 1.45, 2.05),
    )
    known = [s * np.interp(np.arange(9), lengths, row) for s, row in zip(length_3_s, relative_to_3, strict=True)]
    load = np.log(np.maximum(np.arange(33), 1))
    columns = [np.interp(load, np.log(batches), column) for column in np.transpose(known)]
    return [list(map(float, row)) for row in np.transpose(columns)]


VLLM_S = _recorded()
AnyMachine = Machine | VllmMachine | Levelled
