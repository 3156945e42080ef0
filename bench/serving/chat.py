"""Prompts for chat models: the project's own templates (chat.toml) with varied contents, in the model's chat template.

Half of all prompts are held out, by a hash of their text: tracks and measurements draw from these only, and whatever trains
a draft draws from the others.
"""

from __future__ import annotations

import hashlib
import random
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("chat.toml")
KINDS = ("chat-instruction", "chat-turns", "chat-code", "chat-edit", "chat-summary", "chat-extract")
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
        """The same as messages of a chat."""
        roles = ("user", "assistant")
        turns = self.turns(kind, seed, held_out)
        return [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]

    def turns(self, kind: str, seed: int, held_out: bool = True) -> list[str]:
        """Messages of user and assistant in turn, the user first and last."""
        rng = random.Random(seed)
        while True:
            template = rng.choice(self._texts[kind]["prompts"])
            # Of a conversation at least two questions.
            template = template[: rng.randrange(min(3, len(template)), len(template) + 1, 2)]
            turns = fill(template, self._texts["words"], rng)
            if is_held_out("\n".join(turns)) == held_out:
                return turns


def fill(template: Sequence[str], words: dict[str, list[str]], rng: random.Random) -> list[str]:
    """The texts with their placeholders replaced, alike in all of them."""
    chosen: dict[tuple[str, str | None], str] = {}

    def value(match: re.Match[str]) -> str:
        name, number = match.groups()
        if (name, number) not in chosen:
            taken = {text for (other, _), text in chosen.items() if other == name}
            chosen[name, number] = rng.choice([one for one in words[name] if one not in taken])
        return PLACEHOLDER.sub(value, chosen[name, number])

    return [PLACEHOLDER.sub(value, text) for text in template]
