"""libFuzzer's side of `fuzz-by-coverage`: the first byte chooses the kind of message, the rest is the message."""

from __future__ import annotations

import random
import sys

import atheris

with atheris.instrument_imports(include=["speclen.controller", "speclen.worker.requests", "speclen.worker.service"]):
    from chaos.targets import SEEDS, Targets
from google.protobuf.message import DecodeError

TARGETS = Targets()
DICE = random.Random(1)


def give(data: bytes) -> None:
    if not data:
        return
    try:
        message = type(SEEDS[data[0] % len(SEEDS)]).FromString(data[1:])
    except DecodeError:
        return
    TARGETS.give(message, DICE)


if __name__ == "__main__":
    atheris.Setup(sys.argv, give)
    atheris.Fuzz()
