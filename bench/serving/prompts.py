"""Kinds of prompts: completions, edits of a file, extraction and quotes from a text, conversations, prose.

All text comes with Python itself, so that every machine with the same Python draws the same prompts: source files that the
bundled pair did not see in training, and Python's reference manual. The bundled models follow no instructions, so each
kind asks in a way that a model of source code continues: an edited file begins as the file before it began, what is
extracted belongs to an `__all__`.

Prompts of chat models fill the templates of chat.toml. Half of them are held out, by a hash of their text: workloads and
measurements draw from these only, and drafts are trained on the others.
"""

from __future__ import annotations

import hashlib
import random
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from speclen.bench.serving.traffic import CHAT_KINDS, FIRST_TURN_TOKENS, MAX_TURNS, TURN_TOKENS, Arrival
from speclen.worker.profiling.prompts import PromptSource, held_out_texts

FILE = Path(__file__).with_name("chat.toml")
PLACEHOLDER = re.compile(r"\{([a-z]+)(_\d)?\}")


def is_held_out(text: str) -> bool:
    """True for a prompt that no draft is trained on."""
    return hashlib.sha256(text.encode()).digest()[0] < 128


class ChatPrompts:
    """Draws prompts of every kind, each from its own seed."""

    def __init__(self, tokenizer: Any) -> None:
        """Raises ValueError for a tokenizer without a chat template."""
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the target's tokenizer has no chat template, and this track asks a chat model: use another --target "
                "(scripts/real_model makes one) or another --track"
            )
        self._tokenizer = tokenizer
        self._texts = tomllib.loads(FILE.read_text("utf-8"))

    def draw(self, kind: str, seed: int, held_out: bool = True) -> tuple[int, ...]:
        """Token ids of a prompt, up to where the answer begins."""
        messages = self.messages(kind, seed, held_out)
        return tuple(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])

    def messages(self, kind: str, seed: int, held_out: bool = True) -> list[dict[str, str]]:
        """The prompt as messages of a chat."""
        roles = ("user", "assistant")
        turns = self.turns(kind, seed, held_out)
        return [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]

    def turns(self, kind: str, seed: int, held_out: bool = True) -> list[str]:
        """Messages of user and assistant in turn; the first and the last are the user's."""
        rng = random.Random(seed)
        while True:
            template = rng.choice(self._texts[kind]["prompts"])
            # A conversation has at least two questions.
            template = template[: rng.randrange(min(3, len(template)), len(template) + 1, 2)]
            turns = fill(template, self._texts["words"], rng)
            if is_held_out("\n".join(turns)) == held_out:
                return turns


def fill(template: Sequence[str], words: dict[str, list[str]], rng: random.Random) -> list[str]:
    """The texts with placeholders replaced, the same in all texts."""
    chosen: dict[tuple[str, str | None], str] = {}

    def value(match: re.Match[str]) -> str:
        name, number = match.groups()
        if (name, number) not in chosen:
            taken = {text for (other, _), text in chosen.items() if other == name}
            chosen[name, number] = rng.choice([one for one in words[name] if one not in taken])
        return PLACEHOLDER.sub(value, chosen[name, number])

    return [PLACEHOLDER.sub(value, text) for text in template]


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
KINDS = (*TEXTS, *ASKED_OF_TEXTS, "chat", *CHAT_KINDS)


class PromptDrawer:
    """Draws prompts of every kind, each from its own seed; texts are encoded once, when a kind is first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._sources: dict[str, PromptSource] = {}
        self._chat: ChatPrompts | None = None

    def draw(self, kind: str, num_tokens: int, seed: int) -> tuple[int, ...]:
        """Exactly num_tokens token ids; for chat kinds as many as the text has.

        Raises ValueError for an unknown kind, too few tokens for it, or a tokenizer without a chat template.
        """
        if kind in CHAT_KINDS:
            self._chat = self._chat or ChatPrompts(self._tokenizer)
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
