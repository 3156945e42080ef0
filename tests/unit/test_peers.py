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


def test_a_closed_loop_counts_the_same_requests_for_all_and_raises_what_fails(peers: Any) -> None:
    loop = peers("closed_loop")
    prompts = SimpleNamespace(messages=lambda kind, seed: [{"role": "user", "content": f"{kind} {seed}"}])
    kinds = [kind for kind, _ in loop.CHAT.kinds]
    counted = {f"{kinds[number % 6]} {100 + number}" for number in range(4, 4 + loop.SET)}
    asked: list[str] = []
    answered: set[str] = set()
    late: list[bool] = []

    def ask(messages: Any, max_tokens: int) -> int:
        asked.append(messages[0]["content"])
        late.append(counted <= answered)
        loop.time.sleep(0.002)
        answered.add(messages[0]["content"])
        return 10

    found = loop.closed_loop(SimpleNamespace(ask=ask), prompts, 4, 100)
    assert found["tokens_per_s"] == pytest.approx(4 * 10 / found["latency_mean_s"])
    assert found["latency_mean_s"] >= 0.002
    assert counted <= set(asked), "each kind as often, after a first request of each client"
    assert len(asked) == len(set(asked))
    assert sum(late) <= 4, "clients end when the last counted request is answered"

    def fail(*_: Any) -> int:
        raise RuntimeError("it is gone")

    with pytest.raises(RuntimeError, match="it is gone"):
        loop.closed_loop(SimpleNamespace(ask=fail), prompts, 2, 0)


def row(program: str, mode: str, rates: dict[int, float], number: int = 1) -> list[dict[str, Any]]:
    common = {"round": number, "program": program, "mode": mode, "latency_mean_s": 1.0}
    return [common | {"at_once": at, "tokens_per_s": rate} for at, rate in rates.items()]


def test_later_rounds_leave_out_what_cannot_be_the_best(peers: Any) -> None:
    compare = peers("compare")
    rows = [*row("vLLM", "none", {1: 50, 4: 90}), *row("vLLM", "draft 3", {1: 60, 4: 20})]
    rows += [*row("vLLM", "lookup 5", {1: 30, 4: 40}), *row("speclen", "none", {1: 1})]
    repeated = [mode for mode in compare.modes(True) if compare.worth_repeating(mode, rows)]
    assert {(mode.program, mode.name) for mode in repeated} == {
        *(("vLLM", "none"), ("vLLM", "draft 3"), ("speclen", "adaptive"), ("speclen", "none")),
    }


def test_without_a_draft_no_mode_needs_one(peers: Any) -> None:
    assert {mode.kind for mode in peers("compare").modes(False)} == {"adaptive", "none", "lookup"}
