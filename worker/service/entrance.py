"""Where requests wait before they reach the engine: for their text, for their grammar, and for their turn."""

from __future__ import annotations

from speclen.worker.models.loading import ModelPair
from speclen.worker.service.grammars import Grammars
from speclen.worker.service.text_encoder import TextEncoder
from speclen.worker.service.turnstile import Turnstile


class Entrance:
    """For one event loop. num_rows: of the engine. max_waiting: requests that may wait for a row, here or in the engine.

    max_wait_s: see `Turnstile`.
    """

    def __init__(
        self, pair: ModelPair, max_context_length: int, num_rows: int, max_waiting: int, max_wait_s: float = 0.0
    ) -> None:
        self.encoder = TextEncoder(pair.tokenizer, max_context_length)
        self.grammars = Grammars(pair.tokenizer, pair.vocab_size, pair.eos_token_ids)
        # Some wait in the engine, so that a row that becomes free is taken in the next step.
        num_ahead = min(max_waiting, max(1, num_rows // 4))
        self.turnstile = Turnstile(num_rows + num_ahead, max_waiting - num_ahead, max_wait_s)

    @property
    def num_waiting(self) -> int:
        """Requests that wait here."""
        return self.encoder.num_waiting + self.grammars.num_waiting + self.turnstile.num_waiting

    def close(self) -> None:
        self.encoder.close()
        self.grammars.close()
