"""Speculation counts of one request, as vLLM reports them under `metrics.speculative_decoding`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from speclen.worker.requests.request import SequenceOutput


@dataclass(slots=True)
class SpeculationStatistics:
    """Counts over all sequences of a request. accepted[j]: steps that accepted and kept exactly j draft tokens.

    Steps without a draft do not count. num_spec_tokens: the longest draft of a step.
    """

    accepted: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_spec_tokens: int = 0
    _last: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def saw(self, output: SequenceOutput) -> None:
        """Count every output, in order: each is one step, by which its totals grew."""
        key = output.request_id, output.index
        drafted_before, accepted_before = self._last.get(key, (0, 0))
        self._last[key] = output.num_draft_tokens, output.num_accepted_tokens
        drafted = output.num_draft_tokens - drafted_before
        if not drafted:
            return
        run = output.num_accepted_tokens - accepted_before
        self.accepted += [0] * (run + 1 - len(self.accepted))
        self.accepted[run] += 1
        self.num_draft_tokens += drafted
        self.num_spec_tokens = max(self.num_spec_tokens, drafted)

    def as_dict(self) -> dict[str, Any]:
        num_steps = sum(self.accepted)
        num_accepted = sum(run * count for run, count in enumerate(self.accepted))
        return {
            "mean_acceptance_length": 1 + num_accepted / num_steps if num_steps else 1.0,
            "draft_acceptance_rate": num_accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0,
            "acceptance_histogram": self.accepted,
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.num_spec_tokens,
        }
