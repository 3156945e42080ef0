"""Damaged messages."""

from __future__ import annotations

import random


def damaged(message: bytes, dice: random.Random) -> bytes:
    """The message with some bytes flipped, cut off or repeated."""
    data = bytearray(message or b"\0")
    for _ in range(dice.randint(1, 4)):
        kind, where = dice.randrange(4), dice.randrange(len(data))
        if kind == 0:
            data[where] = dice.randrange(256)
        elif kind == 1:
            del data[where:]
        elif kind == 2:
            data[where:where] = data[: dice.randrange(len(data) + 1)]
        else:
            data += bytes(dice.randrange(256) for _ in range(dice.randrange(20)))
        data = data or bytearray(b"\0")
    return bytes(data)
