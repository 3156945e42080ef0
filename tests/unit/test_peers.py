"""scripts/peers: each program gets the same load, and is counted alike."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

PEERS = Path(__file__).parents[2] / "scripts" / "peers"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules by name, found as they find each other."""
    monkeypatch.syspath_prepend(str(PEERS))
    yield lambda name: __import__(name)
    for name in ("closed_loop", "compare", "program"):
        sys.modules.pop(name, None)


def test_only_tokens_within_the_window_count(peers: Any) -> None:
    answer = peers("closed_loop").Answer(begin=2.0, end=6.0, num_tokens=40)
    windows = [(0.0, 10.0), (3.0, 5.0), (5.0, 9.0), (7.0, 9.0)]
    assert [answer.tokens_within(*window) for window in windows] == [40, 20, 10, 0]


def test_a_closed_loop_keeps_its_load_and_raises_what_fails(peers: Any) -> None:
    loop = peers("closed_loop")
    prompts = SimpleNamespace(messages=lambda kind, seed: [{"role": "user", "content": f"{kind} {seed}"}])
    asked: list[tuple[Any, float]] = []

    def ask(messages: Any, max_tokens: int, temperature: float, seed: int) -> int:
        asked.append((messages[0]["content"], temperature))
        loop.time.sleep(0.002)
        return 10

    found = loop.closed_loop(SimpleNamespace(ask=ask), prompts, 4, 100, 0.1)
    assert 0 < found["tokens_per_s"] <= 4 * 10 / 0.002
    assert len({content for content, _ in asked}) == len(asked) > 4
    assert {temperature for _, temperature in asked} == {0.0, 0.7, 1.0}

    def fail(*_: Any) -> int:
        raise RuntimeError("it is gone")

    with pytest.raises(RuntimeError, match="it is gone"):
        loop.closed_loop(SimpleNamespace(ask=fail), prompts, 2, 0, 0.1)


def test_without_a_draft_no_mode_needs_one(peers: Any) -> None:
    assert {mode.kind for mode in peers("compare").modes(False)} == {"adaptive", "none", "lookup"}
