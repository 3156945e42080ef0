"""scripts/peers: everybody is driven with the same load, counted in the same way, and credited with his best mode."""

from __future__ import annotations

import json
import sys
from collections.abc import Hashable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

PEERS = Path(__file__).parents[2] / "scripts" / "peers"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules by name, found as they find each other."""
    monkeypatch.syspath_prepend(str(PEERS))
    names = ("closed_loop", "openvino_genai_modes", "rounds", "table", "transformers_modes", "vllm_modes")
    yield lambda name: __import__(name)
    for name in names:
        sys.modules.pop(name, None)


class Batching:
    """An engine whose requests each take as many steps as they have tokens; `now` is seconds, one a step."""

    def __init__(self) -> None:
        self.now = 0.0
        self.most = 0
        self._left: dict[int, int] = {}
        self._names = iter(range(10**6))

    def add(self, prompt: list[int]) -> Hashable:
        name = next(self._names)
        self._left[name] = 5 + name % 3  # so that requests do not end together
        self.most = max(self.most, len(self._left))
        return name

    def step(self) -> list[tuple[Hashable, int]]:
        self.now += 1
        self._left = {name: left - 1 for name, left in self._left.items()}
        ended = [name for name, left in self._left.items() if left <= 0]
        for name in ended:
            del self._left[name]
        return [(name, 5) for name in ended]


def test_a_steady_load_is_counted_as_what_it_is(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests of five to seven steps at a time: four of five tokens in every six seconds."""
    module, engine = peers("closed_loop"), Batching()
    monkeypatch.setattr(module.time, "perf_counter", lambda: engine.now)
    tokens, elapsed, latencies = module.step_loop(engine, module.Requests([[1], [2]], 5), 4, 600.0)
    assert engine.most == 4
    assert tokens / elapsed == pytest.approx(4 * 5 / 6, rel=0.02)
    assert set(latencies) == {5.0, 6.0, 7.0}


def test_clients_count_what_ended_while_the_load_was_full(peers: Any) -> None:
    count = peers("closed_loop").count
    spans = [(0.0, 2.0), (0.0, 3.0), (2.0, 5.0), (3.0, 6.0), (5.0, 9.0)]
    # From the third second on: the two that ended by 7, whatever they began with; the last one came too late.
    assert count(spans, 3.0, 4.0, 10) == (20, 3.0, [3.0, 3.0])
    assert count(spans[:3], 3.0, 1.0, 10) == (10, 2.0, [3.0])  # slower than the time there was: what came counts


def test_a_wrong_number_of_tokens_is_an_error(peers: Any) -> None:
    module = peers("closed_loop")
    with pytest.raises(RuntimeError, match="5 tokens came instead of 6"):
        module.step_loop(Batching(), module.Requests([[1]], 6), 1, 1.0)
    with pytest.raises(RuntimeError, match="3 tokens came instead of 6"):
        module.Clients(lambda prompt, num_tokens: 3, module.Requests([[1]], 6), 2).run(0.1)


def row(peer: str, mode: str, threads: int, rates: dict[int, float], number: int = 1) -> list[dict[str, Any]]:
    common = {"peer": peer, "mode": mode, "threads": threads, "latency_mean_s": 1.0, "latency_p95_s": 1.0}
    common["round"] = number
    return [common | {"concurrency": at, "tokens_per_s": rate} for at, rate in rates.items()]


def test_later_rounds_leave_out_what_cannot_be_the_best(peers: Any) -> None:
    rounds = peers("rounds")
    ours = rounds.Contestant("speclen", "", "x")
    fast, slow = rounds.Contestant("llama", "llama", "x", ("a",)), rounds.Contestant("llama", "llama", "x", ("b",))
    found = {
        (ours, 1): row("speclen", "none", 1, {1: 10, 4: 40}),
        (ours, 2): row("speclen", "none", 2, {1: 20, 4: 30}),  # each number of threads is best somewhere
        (fast, 1): row("llama.cpp server", "a", 1, {1: 50, 4: 90}),
        (fast, 2): row("llama.cpp server", "a", 2, {1: 60, 4: 100}),
        (slow, 1): row("llama.cpp server", "b", 1, {1: 40, 4: 70}),
        (slow, 2): [],  # failed
    }
    assert list(rounds.repeated(found)) == [(ours, 1), (ours, 2), (fast, 2)]


def test_what_time_was_too_short_for_is_measured_by_going_on(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rounds, calls = peers("rounds"), []
    clock = iter(range(10_000))

    def measure(one: Any, threads: int, *_: Any) -> list[dict[str, Any]]:
        calls.append((one.name, threads))
        [printed] = row(one.peer, one.name, threads, {1: 100.0})
        del printed["round"]  # a contestant does not know it
        return [printed]

    monkeypatch.setattr(rounds, "measure", measure)
    monkeypatch.setattr(rounds.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    lines = tmp_path / "lines.jsonl"
    command = [
        "rounds",
        str(tmp_path),
        str(lines),
        "--rounds",
        "2",
        "--seconds",
        "1",
        "--learn-s",
        "1",
        "--only",
        "llama",
    ]
    ends = []
    for limit in (["--limit-s", "3"], ["--limit-s", "5", "--go-on"], ["--go-on"], ["--go-on"]):
        monkeypatch.setattr(sys, "argv", command + limit)
        with pytest.raises(SystemExit) as ended:
            rounds.main()
        ends.append(ended.value.code)
    assert "--go-on measures the rest" in ends[0]
    assert "--go-on measures the rest" in ends[1]
    assert ends[2:] == [0, 0]
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    places = [(each["round"], each["contestant"], each["threads"]) for each in found]
    assert len(places) == len(set(places)) == len(calls)
    assert {number for number, _, _ in places} == {1, 2}
    assert len([place for place in places if place[0] == 1]) == 12  # six contestants, one or two threads


COPYING = {  # contestants that propose what came before in the text
    "transformers": {"--mode lookup"},  # 5 and 10, one after the other
    "openvino-genai": {"--mode lookup:5", "--mode lookup:10"},
    "vllm": {"--mode ngram:5", "--mode ngram:10"},
    "llama": {"--lookup 5", "--lookup 10"},
}


def test_every_peer_copies_and_has_the_modes_that_rounds_ask_for(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for absent in ("openvino", "openvino_genai"):
        stub: Any = ModuleType(absent)
        stub.ContinuousBatchingPipeline = stub.GenerationConfig = object
        monkeypatch.setitem(sys.modules, absent, stub)
    found = peers("rounds").contestants(1.0, "")
    for peer, copying in COPYING.items():
        asked = {" ".join(one.options) for one in found if one.peer == peer}
        assert copying <= asked
        if peer != "llama":
            modes = peers(peer.replace("-", "_") + "_modes").MODES
            assert asked == {f"--mode {mode}" for mode in modes}


def test_vllm_copies_as_many_tokens_as_its_mode_says(peers: Any) -> None:
    module = peers("vllm_modes")
    for mode, words in module.MODES.items():
        found = module.speculation(Path("weights"), mode) or {"num_speculative_tokens": "no"}
        assert f"{found['num_speculative_tokens']} " in f"{words} "


def test_transformers_looks_up_so_many_tokens_for_one_sequence(peers: Any) -> None:
    module = peers("transformers_modes")
    asked: list[dict[str, Any]] = []

    def generate(ids: Any, **options: Any) -> Any:
        asked.append(options)
        return torch.cat([ids, ids.new_zeros(len(ids), options["max_new_tokens"])], dim=1)

    requests = peers("closed_loop").Requests([[1, 2, 3]], 4)
    found = module.looked_up(SimpleNamespace(generate=generate), requests, 0.01, 10)
    assert (found.mode, found.concurrency) == ("prompt lookup, 10 tokens", 1)
    assert {options["prompt_lookup_num_tokens"] for options in asked} == {10}


def test_rounds_are_told_by_their_spread(peers: Any) -> None:
    table = peers("table")
    lines = [*row("speclen", "none", 2, {1: 200.0}), *row("speclen", "none", 2, {1: 240.0}, 2)]
    lines += [*row("vLLM", "no draft", 2, {1: 100.0}), *row("vLLM", "no draft", 2, {1: 100.0}, 2)]
    rows = table.best_threads(lines)
    page = table.markdown(rows, table.over_best(rows), {"cores": 2})
    assert "| speclen, none | 220 (200 to 240), " in page
    assert "| any of them | 2.20 (2.00 to 2.40), vLLM, no draft |" in page


def test_a_round_that_failed_is_compared_with_none(peers: Any) -> None:
    """The second round of a peer was put against the third of ours."""
    table = peers("table")
    lines = [line for number in (1, 2, 3) for line in row("speclen", "none", 2, {1: 100.0 * number}, number)]
    lines += [*row("vLLM", "no draft", 2, {1: 100.0}, 1), *row("vLLM", "no draft", 2, {1: 300.0}, 3)]
    [ratio] = [one for one in table.over_best(table.best_threads(lines)) if one["peer"] == "vLLM"]
    assert (ratio["ratio_low"], ratio["ratio_high"]) == (1.0, 1.0)


def test_the_ratio_is_to_the_best_mode_of_the_best_peer(peers: Any) -> None:
    table = peers("table")
    lines = [
        *row("speclen", "adaptive", 2, {1: 300.0}),
        *row("speclen", "none", 2, {1: 200.0}),
        *row("vLLM", "draft model, 5 tokens", 1, {1: 200.0}),
        *row("vLLM", "draft model, 5 tokens", 2, {1: 240.0}),
        *row("vLLM", "no draft", 2, {1: 100.0}),
        *row("llama.cpp server", "no draft", 2, {1: 160.0}),
    ]
    ratios = table.over_best(table.best_threads(lines))
    found = {(one["what"].split()[2], one["peer"]): (one["ratio"], one["best_mode"]) for one in ratios}
    assert found["adaptive", table.ANYONE] == (1.25, "vLLM, draft model, 5 tokens")
    assert found["none", table.ANYONE] == (1.25, "llama.cpp server, no draft")
    assert found["none", "vLLM"] == (2.0, "vLLM, no draft")
    page = table.markdown(table.best_threads(lines), ratios, {"cores": 2})
    assert "| speclen, none | 200, " in page  # one round has no spread
    assert "| any of them | 1.25, vLLM, draft model, 5 tokens |" in page
