"""Logits that are NaN or infinite end their own request with an error, and nothing else changes."""

import copy
import math
import random
from typing import Any

import pytest
import torch

from speclen.worker.frontend.async_engine import error_of
from speclen.worker.requests.request import FinishReason, RequestFailedError
from speclen.worker.sampling.host import HostRule
from speclen.worker.sampling.rules import BatchSampling, RowSampling, SamplingRule
from tests.support import engines
from tests.support.engines import BACKENDS, Collected, generate, make_engine, make_pair, request

NAN, INF, DRAFT_NAN = 13, 14, 15  # tokens whose embeddings are not finite
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "with a seed": {"temperature": 1.0, "seed": 3},
    "drawn": {"temperature": 1.0},
    "penalised": {"repetition_penalty": 1.2},
    "truncated": {"temperature": 1.0, "seed": 3, "top_k": 5},
}


def damaged(model: Any, **tokens: float) -> Any:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for token, value in tokens.items():
            model.get_input_embeddings().weight[int(token[1:])] = value
    return model


@pytest.fixture(scope="module")
def pair():
    target, draft = engines.models("llama")
    broken = {f"t{NAN}": math.nan, f"t{INF}": math.inf}
    return make_pair(target=damaged(target, **broken), draft=damaged(draft, **broken, **{f"t{DRAFT_NAN}": math.nan}))


def harmless(seed: int) -> list[int]:
    return [token for token in engines.random_prompt(random.Random(seed)) if token not in (NAN, INF)] + [20]


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_with_non_finite_logits_fail_alone(pair, backend):
    """Story: a damaged embedding gave an empty answer marked as complete, and JSON that no client could parse."""
    bias = {NAN: -100.0, INF: -100.0}
    good = [
        request(f"good {kind}", harmless(at), max_tokens=12, ignore_eos=True, logit_bias=bias, **settings)
        for at, (kind, settings) in enumerate(KINDS.items())
        if kind != "drawn"
    ]
    bad = [
        request(f"bad {kind} {token}", [20, token, 21], max_tokens=12, logprobs=2, **settings)
        for kind, settings in KINDS.items()
        for token in (NAN, INF)
    ]
    bad.append(request("bad several", [NAN], max_tokens=12, n=2, temperature=1.0))
    mixed = [one for both in zip(bad, [*good, *good, *good], strict=False) for one in both][: 2 * len(good)]
    engine = make_engine(pair, 3, backend=backend)
    collected = generate(engine, *mixed, *bad[len(good) :])
    for name, index in collected.outputs:
        if name.startswith("bad"):
            check_failed(collected, name, index)
    again = generate(engine, *good)  # in the same rows and blocks
    alone = generate(make_engine(pair, 0, backend=backend), *good)
    for one in good:
        assert collected.ids(one.request_id) == again.ids(one.request_id) == alone.ids(one.request_id)
        assert len(alone.ids(one.request_id)) == 12
    assert engine.load().num_kv_tokens_used == 0


def check_failed(collected: Collected, name: str, index: int = 0) -> None:
    last = collected.last(name, index)
    assert last.finish_reason is FinishReason.ABORT
    assert "NaN or infinite" in last.error
    assert isinstance(error_of(last), RequestFailedError)
    assert all(math.isfinite(one.logprob) for output in collected.outputs[name, index] for one in output.logprobs)


@pytest.mark.parametrize("length", [0, 1, 4])
def test_tokens_before_a_non_finite_logit_are_emitted(pair, length):
    """The model is made to write the token that breaks it."""
    plain = generate(make_engine(pair, 0), request("x", [30, 31, 32], max_tokens=9, ignore_eos=True)).ids("x")
    target = damaged(pair.target, **{f"t{plain[5]}": math.nan})
    engine = make_engine(make_pair(target=target), length)
    collected = generate(engine, request("x", [30, 31, 32], max_tokens=9, ignore_eos=True))
    first = plain.index(plain[5])
    assert collected.ids("x") == plain[: first + 1]
    check_failed(collected, "x")


def test_a_draft_with_non_finite_logits_changes_no_output(pair):
    prompt = [30, DRAFT_NAN, 31, 32]
    for kind, settings in KINDS.items():
        if kind == "drawn":
            continue
        wanted = request("x", prompt, max_tokens=12, ignore_eos=True, **settings)
        healthy = make_pair(draft=pair.draft)
        assert generate(make_engine(healthy, 4), wanted).ids("x") == generate(make_engine(healthy, 0), wanted).ids("x")
