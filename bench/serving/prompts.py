"""Kinds of prompts: completions, edits of a file, extraction and quotes from a text, conversations, prose.

All text comes with Python itself, so that every machine with the same Python draws the same prompts: source files that the
bundled pair did not see in training, and Python's reference manual. The bundled models follow no instructions, so each
kind asks in a way that a model of source code continues: an edited file begins as the file before it began, what is
extracted stands in an `__all__`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from speclen.bench.serving import chat
from speclen.bench.serving.tracks import FIRST_TURN_TOKENS, MAX_TURNS, TURN_TOKENS, Arrival
from speclen.worker.profiling.prompts import PromptSource, held_out_texts

HEAD_TOKENS = 12  # of the file or sentence that is to be repeated: enough to know which
CONVERSATION_TOKENS = FIRST_TURN_TOKENS + MAX_TURNS * TURN_TOKENS


def prose_texts() -> list[str]:
    """English prose: Python's reference manual as `help()` prints it, which the bundled pair was not trained on."""
    from pydoc_data.topics import topics

    return list(topics.values())


TEXTS: dict[str, Callable[[], list[str]]] = {"code": held_out_texts, "prose": prose_texts}
# kind: text that it is about, what stands between that and the answer, whether the answer's first tokens are given
ASKED_OF_TEXTS = {
    "edit": ("code", "\n\n\n# The same, with another name:\n", True),
    "extract": ("code", '\n\n\n__all__ = [\n    "', False),
    "quote": ("prose", '\n\nAs was said above: "', True),
}
KINDS = (*TEXTS, *ASKED_OF_TEXTS, "chat", *chat.KINDS)


class PromptDrawer:
    """Draws prompts of every kind, each from its own seed; texts are encoded once, when a kind is first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._sources: dict[str, PromptSource] = {}
        self._chat: chat.ChatPrompts | None = None

    def draw(self, kind: str, num_tokens: int, seed: int) -> tuple[int, ...]:
        """Exactly num_tokens ids; for chat models as many as the text has.

        Raises ValueError for an unknown kind, too few tokens for it, or a tokenizer without a chat template.
        """
        if kind in chat.KINDS:
            self._chat = self._chat or chat.ChatPrompts(self._tokenizer)
            return self._chat.draw(kind, seed)
        if kind in TEXTS:
            return self._text(kind, num_tokens, seed)
        if kind == "chat":
            if num_tokens > CONVERSATION_TOKENS:
                raise ValueError(f"a conversation has at most {CONVERSATION_TOKENS} tokens, not {num_tokens}")
            return self._text("code", CONVERSATION_TOKENS, seed)[:num_tokens]
        if kind not in ASKED_OF_TEXTS:
            raise ValueError(f"prompts of kind {kind!r} are unknown: use {', '.join(KINDS)}")
        return self._asked_of_text(kind, num_tokens, seed)

    def for_arrivals(self, arrivals: Sequence[Arrival]) -> list[tuple[int, ...]]:
        return [self.draw(arrival.kind, arrival.prompt_tokens, arrival.prompt_seed) for arrival in arrivals]

    def _text(self, kind: str, num_tokens: int, seed: int) -> tuple[int, ...]:
        if kind not in self._sources:
            self._sources[kind] = PromptSource(self._tokenizer, TEXTS[kind]())
        return self._sources[kind].draw(num_tokens, seed)

    def _asked_of_text(self, kind: str, num_tokens: int, seed: int) -> tuple[int, ...]:
        about, question, with_head = ASKED_OF_TEXTS[kind]
        asked = tuple(self._tokenizer(question, add_special_tokens=False)["input_ids"])
        length = num_tokens - len(asked) - with_head * HEAD_TOKENS
        if length < HEAD_TOKENS:
            raise ValueError(f"a prompt of kind {kind} needs at least {num_tokens - length + HEAD_TOKENS} tokens")
        text = self._text(about, length, seed)
        return text + asked + (text[:HEAD_TOKENS] if with_head else ())
