"""A failure, or logits that are not finite, end only one prompt, one sequence or one step."""

import copy
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest
import torch

from speclen.records import Arm
from speclen.worker.backends.passes import PassPart
from speclen.worker.engine.engine import Engine
from speclen.worker.frontend.async_engine import error_of
from speclen.worker.requests.request import FinishReason, RequestFailedError, SequenceOutput
from speclen.worker.requests.sequence import SequenceState
from tests.support import engines
from tests.support.engines import BACKENDS, PROMPT, Arms, Collected, finish, generate, make_engine, make_pair, request


def fail_once_with_prompts(engine: Engine) -> list[int]:
    """Make the next pass fail that both decodes and prefills; returns a list that then holds its number of parts."""
    honest, failed = engine.target.forward, []

    def failing(parts: Sequence[PassPart]) -> list[torch.Tensor]:
        logits = honest(parts)  # keys and values are written
        if len(parts) > 1 and not failed:
            failed.append(len(parts))
            raise MemoryError
        return logits

    engine.target.forward = failing
    return failed


@pytest.mark.parametrize("settings", [{}, {"seed": 3}, {"repetition_penalty": 1.3, "min_tokens": 5}])
def test_sampled_sequences_survive_a_step_that_failed_with_a_prompt(settings):
    """Story: the step was repeated with a rule that held the distributions of the first, and all sequences were aborted."""
    engine, collected = make_engine(chooser=2), Collected()
    running = request("running", PROMPT, temperature=1.0, max_tokens=20, ignore_eos=True, **settings)
    engine.submit(running, collected)
    for _ in range(3):
        engine.step()
    failed = fail_once_with_prompts(engine)
    engine.submit(request("new", PROMPT, max_tokens=8, ignore_eos=True), collected)
    finish(engine)
    assert failed == [2]
    for name in ("running", "new"):
        assert collected.reason(name) is FinishReason.LENGTH
    if "seed" in settings:
        assert collected.ids("running") == generate(make_engine(chooser=0), running).ids("running")


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize("num_prompts", [1, 2, 3])
def test_prompts_of_a_failed_step_keep_their_rows_when_another_row_ends(length, num_prompts):
    """Story: sequences moved to other slots, prompts were written to the old ones, and callers got wrong text."""
    engine, collected, rng = make_engine(chooser=length, max_batch_size=8), Collected(), random.Random(4)
    others = [request("long", PROMPT, max_tokens=40, ignore_eos=True), request("short", PROMPT[:3], max_tokens=2)]
    for one in others:
        engine.submit(one, collected)
    engine.step()
    failed = fail_once_with_prompts(engine)
    new = [
        request(str(at), engines.random_prompt(rng, 30), max_tokens=12, ignore_eos=True) for at in range(num_prompts)
    ]
    for one in new:
        engine.submit(one, collected)
    engine.step()
    assert collected.reason("short") is FinishReason.LENGTH
    assert failed == [1 + num_prompts]
    finish(engine)
    for one in [*others, *new]:
        assert collected.ids(one.request_id) == generate(make_engine(), one).ids(one.request_id)


@pytest.mark.parametrize(
    ("error", "num_tries"),
    [(None, 1), (RuntimeError("no such kernel"), 1), (torch.OutOfMemoryError("no room for so many logits"), 2)],
    ids=["draft", "verification", "memory"],
)
def test_sequences_continue_without_drafts_when_drafting_fails(error, num_tries):
    """Story: every request ended with an error while the worker called itself healthy, though plain decoding worked.

    After an out-of-memory error drafting is tried again 16 steps later: another request may have released memory.
    """
    chooser = Arms(Arm(3))
    engine = make_engine(chooser=chooser)
    if error is None:
        engine.draft.forward = fail
    else:
        honest = engine.target.forward

        def failing(parts: Sequence[PassPart]) -> list[torch.Tensor]:
            if parts[0].num_logits > 1:
                raise error
            return honest(parts)

        engine.target.forward = failing
    requests = [request(name, PROMPT, max_tokens=20, ignore_eos=True) for name in ("a", "b")]
    collected = generate(engine, *requests)
    for one in requests:
        assert collected.ids(one.request_id) == generate(make_engine(chooser=0), one).ids(one.request_id)
    assert {result.arm.speculation_length for result in chooser.records} == {0}
    assert len(chooser.records) == 19 - num_tries, "a try that fails has no record"


def test_a_failing_callback_does_not_affect_other_requests():
    engine = make_engine()
    collected = Collected()

    def fails(output: SequenceOutput) -> None:
        raise RuntimeError("closed")

    engine.submit(request("closed", PROMPT, max_tokens=5), fails)
    engine.submit(request("x", PROMPT, max_tokens=5, ignore_eos=True), collected)
    finish(engine)
    assert len(collected.ids("x")) == 5


# Outside of a step.


def fail(*args: object, **options: object) -> NoReturn:
    raise MemoryError("no room")


def test_a_sequence_that_cannot_be_admitted_ends_alone(monkeypatch):
    """Story: an error while its sampling state was made also ended the sequences that were decoding."""
    engine, honest = make_engine(), SequenceState.start_sampling
    monkeypatch.setattr(
        SequenceState, "start_sampling", lambda s, *args: fail() if s.request.request_id == "bad" else honest(s, *args)
    )
    collected = generate(engine, *(request(name, PROMPT, max_tokens=10, ignore_eos=True) for name in ("a", "bad", "b")))
    assert collected.last("bad").error == "MemoryError: no room"
    assert [collected.reason(name) for name in "ab"] == [FinishReason.LENGTH] * 2
    assert engine.load().num_kv_tokens_used == 0
    assert engine.scheduler.num_reserved_tokens == 0


def test_an_exception_outside_a_step_aborts_requests_and_the_engine_continues(monkeypatch):
    """Story: decoding sequences were released outside inference mode, which failed and ended the engine's thread."""
    engine, collected, left = make_engine(max_batch_size=2, chooser=0), Collected(), [*"abcd", "after"]
    honest, count = engine.scheduler.admit, itertools.count(1)
    monkeypatch.setattr(engine.scheduler, "admit", lambda: fail() if next(count) == 6 else honest())

    def tell(output: SequenceOutput) -> None:
        collected(output)
        if output.finish_reason is None:
            return
        left.remove(output.request_id)
        if left == ["after"]:
            engine.submit(request("after", PROMPT, max_tokens=8, ignore_eos=True), tell)
        elif not left:
            engine.stop()

    for name in "abcd":
        engine.submit(request(name, PROMPT, max_tokens=100, ignore_eos=True), tell)
    engine.run()
    for name in "abcd":
        assert collected.reason(name) is FinishReason.ABORT
        assert collected.last(name).error == "MemoryError: no room"
    alone = generate(make_engine(), request("x", PROMPT, max_tokens=8, ignore_eos=True))
    assert collected.ids("after") == alone.ids("x")
    assert engine.failure is None
    assert engines.DEVICE.type != "cpu" or engine.target.pool.num_bytes_held() == 0


# Logits that are NaN or infinite end their own request.

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
