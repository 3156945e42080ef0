"""A launched step: its tokens and log probabilities, once the device is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from speclen.records import StepFlag
from speclen.worker.engine.speculative import RowLogits
from speclen.worker.engine.step_plan import StepPlan
from speclen.worker.requests.request import TokenLogprobs
from speclen.worker.requests.sequence import SequenceState


@dataclass(slots=True)
class Decided:
    """Tokens of sequences, as in StepOutcome. logits: empty where log probabilities are not wanted."""

    sequences: Sequence[SequenceState]
    num_accepted: torch.Tensor | np.ndarray
    ids: torch.Tensor | np.ndarray
    logits: RowLogits = ()

    def read(self) -> tuple[list[list[int]], list[list[TokenLogprobs] | None]]:
        """New tokens of each sequence, and their log probabilities, as soon as the device has them."""
        return new_tokens(self.num_accepted, self.ids), logprobs_of(self.sequences, self.logits, self.ids)


@dataclass(slots=True)
class LaunchedStep:
    """A step under way. decided: for the rows, then for sequences whose prompts it completes.

    flags: reasons for which it is no usable sample. ids, logprobs: after `read`, new tokens of each of the plan's sequences
    in its order, None where a prompt goes on, empty where the logits are NaN or infinite; and their log probabilities, None
    where not wanted.
    """

    plan: StepPlan
    flags: set[StepFlag]
    decided: list[Decided] = field(default_factory=list)
    ids: list[list[int] | None] = field(default_factory=list)
    logprobs: list[list[TokenLogprobs] | None] = field(default_factory=list)

    def read(self) -> None:
        """Set ids and logprobs, as soon as the device has them."""
        for decided in self.decided:
            ids, logprobs = decided.read()
            self.ids += ids
            self.logprobs += logprobs
        for at, chunk in enumerate(self.plan.chunks, len(self.plan.rows)):
            if not chunk.completes_prompt:
                self.ids.insert(at, None)
                self.logprobs.insert(at, None)


def new_tokens(num_accepted: torch.Tensor | np.ndarray, ids: torch.Tensor | np.ndarray) -> list[list[int]]:
    """Each row's first num_accepted + 1 tokens, none for -1. On a GPU this is the step's one synchronisation."""
    if isinstance(num_accepted, torch.Tensor) and isinstance(ids, torch.Tensor) and not ids.is_cpu:
        table = torch.cat([num_accepted[:, None], ids], dim=1).tolist()
        return [row[1 : row[0] + 2] for row in table]
    return [row[: count + 1] for count, row in zip(num_accepted.tolist(), ids.tolist(), strict=True)]


def logprobs_of(
    rows: Sequence[SequenceState], logits: RowLogits, ids: torch.Tensor | np.ndarray
) -> list[list[TokenLogprobs] | None]:
    """Log probabilities per column of each row: of its token and the most likely ones. None for rows without any.

    logits: of each row, [columns, vocab] as the model gave them; ids: [rows, the most columns]. Natural logarithms.
    """
    found: list[list[TokenLogprobs] | None] = [None] * len(rows)
    asked = rows if len(logits) else ()
    wanted = [(at, k) for at, row in enumerate(asked) if (k := row.request.sampling.logprobs) is not None]
    if not wanted:
        return found
    counts = [len(logits[at]) for at, _ in wanted]
    logprobs = torch.log_softmax(torch.cat([logits[at] for at, _ in wanted]).float(), dim=-1)
    tokens = torch.cat([torch.as_tensor(ids[at, :count]) for (at, _), count in zip(wanted, counts, strict=True)])
    top = logprobs.topk(max(k for _, k in wanted), dim=-1)
    own = logprobs.gather(-1, tokens[:, None])[:, 0]
    entries = zip(own.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
    for (at, k), count in zip(wanted, counts, strict=True):
        found[at] = [
            TokenLogprobs(logprob, tuple(likely[:k]), tuple(values[:k]))
            for logprob, likely, values in islice(entries, count)
        ]
    return found
