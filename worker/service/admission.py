"""Admission queues: for templates, long texts, new grammars, and slots."""

from __future__ import annotations

from speclen.worker.models.loading import ModelPair
from speclen.worker.service.fair_queue import Aside, FairQueue
from speclen.worker.service.grammars import Grammars
from speclen.worker.service.text_encoder import TextEncoder


class Admission:
    """For one event loop. num_rows: of the engine. max_waiting: requests that may wait for a slot, here or in the engine.

    max_wait_s: see `FairQueue`.
    """

    def __init__(
        self, pair: ModelPair, max_context_length: int, num_rows: int, max_waiting: int, max_wait_s: float = 0.0
    ) -> None:
        self.encoder = TextEncoder(pair.tokenizer, max_context_length)
        # As many as may run or wait: a chat for which the queue has room is not refused for its template.
        self.templates = Aside("templates", num_rows + max_waiting)
        self.grammars = Grammars(pair.tokenizer, pair.vocab_size, pair.eos_token_ids, num_rows)
        # Some wait in the engine, so that a free slot is taken in the next step.
        num_ahead = min(max_waiting, max(1, num_rows // 4))
        full = f"{max_waiting} requests are waiting already, which is --max-waiting"
        self.fair_queue = FairQueue(num_rows + num_ahead, max_waiting - num_ahead, max_wait_s, full)

    @property
    def num_waiting(self) -> int:
        """Waiting requests."""
        return sum(stage.num_waiting for stage in self._stages)

    def expected_wait_s(self, caller: str) -> float:
        """Expected seconds in all queues for one more request of the caller."""
        return sum(stage.expected_wait_s(caller) for stage in self._stages)

    @property
    def _stages(self) -> tuple[FairQueue, ...]:
        return self.templates, self.encoder.aside, self.grammars.aside, self.fair_queue

    def close(self) -> None:
        self.templates.close()
        self.encoder.aside.close()
        self.grammars.close()
