"""Grammars for structured output, compiled by llguidance and cached.

llguidance is one file of 3 MB without dependencies, builds a grammar in about a millisecond, and can roll back rejected
tokens. (xgrammar needs triton; outlines-core has no recursion.) It is optional: the extra `grammar`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from speclen.worker.service.fair_queue import Aside
from speclen.worker.structured import trial
from speclen.worker.structured.grammar import Grammar
from speclen.worker.structured.source import StructuredOutput, reason, shown, source

MAX_WAITING = 16  # new grammars
TRIAL_S = 5.0  # that one may take
MAX_CACHED = 128  # grammars
MAX_CACHED_BYTES = 256 * 2**20
# Over all sequences: initial bytes, and lexer states of some 2 kB each, which are made on demand.
MAX_BYTES, MAX_ALL_STATES = 2 * 2**30, 400_000
LEAST_BYTES, LEAST_STATES = 16 * 2**20, 4000  # that one sequence may have, however many there are


class Grammars:
    """For one event loop. Each new grammar is tried in a process of its own and then built, both in one thread.

    vocab_size: of the models' logits. end_ids: the target's end tokens. num_rows: of the engine, each of which may have a
    copy of a grammar's state.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int], num_rows: int = 1, trial_s: float = TRIAL_S
    ) -> None:
        self._max_bytes = max(MAX_BYTES // num_rows, LEAST_BYTES)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = list(end_ids)
        self._trial = trial.Trial(trial_s, min(trial.MAX_LEXER_STATES, max(MAX_ALL_STATES // num_rows, LEAST_STATES)))
        self._matching: Any = None  # llguidance's tokenizer
        self._prepared: OrderedDict[StructuredOutput, Grammar] = OrderedDict()  # the least used first
        self.aside = Aside("grammars", MAX_WAITING)

    async def prepare(self, wanted: StructuredOutput, caller: str) -> Grammar:
        """The compiled grammar. Raises ValueError with one sentence, or QueueFullError when too many new ones wait."""
        if wanted not in self._prepared:
            self._prepared[wanted] = await self.aside.do(caller, self._make, wanted)
            while len(self._prepared) > 1 and (
                len(self._prepared) > MAX_CACHED
                or sum(one.num_bytes for one in self._prepared.values()) > MAX_CACHED_BYTES
            ):
                self._prepared.popitem(last=False)
        self._prepared.move_to_end(wanted)
        return self._prepared[wanted]

    def _make(self, wanted: StructuredOutput) -> Grammar:
        if (known := self._prepared.get(wanted)) is not None:  # made while this call waited
            return known
        text = source(wanted)
        if self._matching is None:
            self._matching = self._make_tokenizer(wanted)
        error, num_bytes = self._trial.run(text)
        if error:
            raise ValueError(f"{wanted.field} {shown(wanted.text)} cannot be used: {reason(error)}")
        if num_bytes > self._max_bytes:
            too_much = f"takes {num_bytes / 2**20:.0f} MiB, and may take {self._max_bytes / 2**20:.0f}"
            raise ValueError(f"{wanted.field} {shown(wanted.text)} cannot be used: it {too_much}")
        matcher = trial.make_matcher(self._matching, text, self._trial.max_states)
        return Grammar(matcher, self._vocab_size, self._end_ids, num_bytes)

    def _make_tokenizer(self, wanted: StructuredOutput) -> Any:
        """llguidance's own, which takes up to a second. Raises ValueError where there can be none."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not self._end_ids:
            missing = "end token" if backend is not None else "fast tokenizer"
            raise ValueError(f"{wanted.field} cannot be used: the model has no {missing}")
        padded = self._vocab_size if self._vocab_size > len(self._tokenizer) else None
        facts = {"text": backend.to_str(), "vocab_size": padded, "end_ids": self._end_ids}
        try:
            made = trial.make_tokenizer(**facts)
        except ValueError as error:
            raise ValueError(f"{wanted.field} cannot be used with this model's tokenizer: {error}") from error
        self._trial.facts = facts
        return made

    def close(self) -> None:
        """Wait for the running trial, and end its process."""
        self.aside.close(wait=True)
        self._trial.stop()
