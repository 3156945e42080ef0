"""Promises to callers: reproducible seeds, exact distributions, cancelling; and which sequences draft or propose n-grams."""

import random
from collections import Counter

import pytest
import torch

from speclen.records import PLAIN, Arm, StepFlag
from speclen.worker.arms import FixedArm
from speclen.worker.backends.passes import PassPart
from speclen.worker.requests.request import FinishReason
from tests.support import engines, tiny_models
from tests.support.engines import LONG, LOOP, PROMPT, Arms, Collected, generate, make_engine, make_pair, request


def test_tokens_beyond_the_end_of_a_request_do_not_count_as_accepted():
    """Tokens beyond the end are not delivered and must not make a length look better. The draft is the target itself."""
    target, _ = engines.models("llama")
    script = Arms(Arm(5))
    requests = [request(str(at), PROMPT, max_tokens=wanted, ignore_eos=True) for at, wanted in enumerate((4, 7))]
    generate(make_engine(make_pair(draft=target), script), *requests)
    assert [result.accepted_histogram for result in script.records] == [(0, 0, 1, 0, 0, 1)]


# Sampling.


def test_a_seed_gives_the_same_tokens_whatever_the_batch_and_the_lengths():
    """Promised in float32 on one machine: noise goes by seed, sequence and position, and drafts do not change a choice."""
    settings = {"temperature": 0.9, "top_p": 0.95, "min_p": 0.01, "max_tokens": 24, "seed": 5, "n": 2}
    alone = generate(make_engine(chooser=0), request("x", PROMPT, **settings))
    generator = random.Random(0)
    changing = engines.RandomLengths(1), engines.RandomLengths(2), engines.RandomArms(3)
    for lengths in (FixedArm(Arm(4)), FixedArm(Arm(0, True)), *changing):
        others = [
            request(str(at), engines.random_prompt(generator), max_tokens=20, temperature=generator.choice([0, 1.0]))
            for at in range(6)
        ]
        engine = make_engine(chooser=lengths, ngram=True)
        busy = generate(engine, *others[:3], request("x", PROMPT, **settings), *others[3:])
        for index in range(2):
            assert busy.ids("x", index) == alone.ids("x", index)
    assert alone.ids("x", 0) != alone.ids("x", 1)
    other = generate(make_engine(chooser=0), request("x", PROMPT, **(settings | {"seed": 6})))
    assert other.ids("x", 0) != alone.ids("x", 0)


def test_a_seeded_sequence_accepts_all_drafts_of_a_draft_that_is_the_target():
    """Story: with the noise of another position outputs were right, but no draft was accepted."""
    target, _ = engines.models("llama")
    settings = {"temperature": 1.0, "seed": 3, "max_tokens": 21, "ignore_eos": True}
    last = generate(make_engine(make_pair(draft=target), 4), request("x", PROMPT, **settings)).last("x")
    assert last.num_accepted_tokens == last.num_draft_tokens > 0


def test_penalties_and_bias_act_the_same_with_and_without_drafts():
    """Greedy decoding under edits, against a loop that applies them one token at a time."""
    settings = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7, "max_tokens": 30}
    edits = {**settings, "logit_bias": {7: 2.0, 8: -100.0}, "min_tokens": 20}
    target, _ = engines.models("llama")
    ids = list(PROMPT)
    for position in range(30):
        logits = engines.plain_logits(target, ids)[-1].clone()
        output = ids[len(PROMPT) :]
        for token in range(tiny_models.VOCAB_SIZE):
            if token in ids:
                logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
            logits[token] -= 0.5 * (token in output) + 0.7 * output.count(token)
        logits[7] += 2.0
        logits[8] -= 100.0
        if position < 20:
            logits[tiny_models.EOS_ID] = -torch.inf
        ids.append(int(logits.argmax()))
        if ids[-1] == tiny_models.EOS_ID:
            break
    for length in (0, 4):
        engine = make_engine(chooser=length)
        collected = generate(engine, request("x", PROMPT, **edits), request("plain", PROMPT, max_tokens=30))
        assert collected.ids("x") == ids[len(PROMPT) :]
    assert engine.load().num_accepted_tokens > 0


def test_log_probabilities_are_the_targets():
    settings = {"temperature": 0.8, "top_k": 5, "max_tokens": 12, "ignore_eos": True, "seed": 3}
    requests = [request(str(k), PROMPT, **settings, logprobs=k) for k in (0, 3)]
    collected = generate(make_engine(chooser=3), *requests, request("none", PROMPT, **settings))
    target, _ = engines.models("llama")
    ids = collected.ids("3")
    expected = torch.log_softmax(engines.plain_logits(target, [*PROMPT, *ids])[len(PROMPT) - 1 : -1], -1)
    entries = [entry for output in collected.outputs["3", 0] for entry in output.logprobs]
    assert len(entries) == len(ids)
    for at, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(expected[at, ids[at]]), abs=1e-4)
        assert list(entry.top_logprobs) == pytest.approx(expected[at].topk(3).values.tolist(), abs=1e-4)
        assert list(entry.top_ids) == expected[at].topk(3).indices.tolist()
    assert all(len(e.top_ids) == 0 for output in collected.outputs["0", 0] for e in output.logprobs)
    assert not any(output.logprobs for output in collected.outputs["none", 0])


def test_sequences_of_one_prompt_share_its_keys_and_values():
    """Greedy copies are identical, and the prompt is fed once, not five times."""
    engine, fed = make_engine(max_batch_size=5), []
    honest = engine.target.forward

    def counting(parts: list[PassPart]) -> list[torch.Tensor]:
        fed.extend(part.num_queries for part in parts if part.num_queries > 1 == part.num_logits)
        return honest(parts)

    engine.target.forward = counting
    collected = generate(engine, request("x", PROMPT, n=5, max_tokens=15))
    assert sum(fed) == len(PROMPT)
    outputs = {tuple(collected.ids("x", index)) for index in range(5)}
    assert len(outputs) == 1
    assert outputs == {tuple(generate(make_engine(), request("x", PROMPT, max_tokens=15)).ids("x"))}


# Speculation lengths.


def test_length_0_never_runs_the_draft():
    engine = make_engine(chooser=0)
    generate(engine, request("first", PROMPT, max_tokens=3))  # the first step has yet to learn that nothing is drafted

    def forbidden(*args: object, **options: object) -> None:
        raise AssertionError("the draft ran")

    engine.draft.forward = forbidden
    assert generate(engine, request("x", PROMPT, max_tokens=20)).reason("x") is not FinishReason.ABORT
    assert engine.load().num_draft_tokens == 0


@pytest.mark.parametrize("between", [[Arm()] * 2, [Arm()] * 30, [Arm(0, ngram=True)] * 3])
def test_the_draft_catches_up_after_steps_without_it_and_the_step_is_flagged(between):
    """Story: a stale draft made acceptance look low for good. A draft that is the target must stay perfect."""
    target, _ = engines.models("llama")
    script = Arms(Arm(2), *between, Arm(3))
    engine = make_engine(make_pair(draft=target), script, ngram=True)
    requests = [request(str(at), [5, 6, 7, 8] * 5 + PROMPT[:at], max_tokens=60, ignore_eos=True) for at in range(3)]
    generate(engine, *requests)
    flagged = [at for at, result in enumerate(script.records) if StepFlag.CATCH_UP in result.flags]
    assert flagged == [1 + len(between)]
    assert not between[0].ngram or engine.load().num_ngram_tokens > 0
    drafted = [result for result in script.records if result.arm.speculation_length]
    assert all(sum(result.accepted_histogram[:-1]) == 0 for result in drafted[:6])


@pytest.mark.parametrize("slow_changes", [False, True])
def test_the_first_steps_of_another_length_are_flagged_where_the_backend_takes_longer_for_it(slow_changes):
    script = Arms(*map(Arm, (2, 2, 3, 3, 0, 0, 2)))
    engine = make_engine(chooser=script)
    engine.target.slow_changes = slow_changes
    generate(engine, *(request(str(at), PROMPT, max_tokens=100, ignore_eos=True) for at in range(2)))
    flagged = [at for at, result in enumerate(script.records[:9]) if StepFlag.CHANGED_ARM in result.flags]
    assert flagged == (list(range(2, 9)) if slow_changes else [])


# Joining, leaving, refusing.


def test_a_large_request_waits_for_memory_and_is_not_overtaken():
    engine, collected = make_engine(max_kv_tokens=110), Collected()
    for name, num_tokens in (("small", 20), ("large", 90), ("small, too", 20)):
        engine.submit(request(name, [5, 6, 7], max_tokens=num_tokens, ignore_eos=True), collected)
    seen = []
    while engine.load().num_running or engine.load().num_waiting:
        engine.step()
        seen.append({row.request.request_id for row in engine.scheduler.rows})
    assert [names for at, names in enumerate(seen) if names and names not in seen[:at]] == [
        {"small"},
        {"large"},
        {"small, too"},
    ]
    assert engine.scheduler.num_reserved_tokens == 0


@pytest.mark.parametrize("moment", ["waiting", "prefilling", "decoding"])
def test_abort_frees_the_row_before_the_next_step(moment):
    engine = make_engine(max_batch_size=1 if moment == "waiting" else 4, prefill_chunk=4)
    collected = Collected()
    engine.submit(request("other", PROMPT[:2], max_tokens=40, ignore_eos=True), collected)
    engine.step()
    engine.submit(request("x", [5] * 30, max_tokens=40, n=2, ignore_eos=True), collected)
    for _ in range(20 if moment == "decoding" else 2):
        engine.step()
    assert engine.abort("x")
    engine.step()
    assert not engine.abort("x")
    assert all(s.request.request_id == "other" for s in engine.scheduler.rows)
    for index in range(2):
        assert collected.reason("x", index) is FinishReason.ABORT
    engines.finish(engine)
    assert len(collected.ids("other")) == 40
    assert not engine.abort("never heard of")


# N-grams.

NGRAM = Arm(0, ngram=True)


def ngram_engine(chooser: object, **settings: object) -> engines.Engine:
    return make_engine(chooser=chooser, **{"ngram": True, **settings})


def test_without_a_draft_model_n_grams_are_proposed():
    chooser, pair = Arms(Arm(3, ngram=True)), make_pair(draft=None)
    pair.draft = None
    engine = make_engine(pair, chooser, ngram=True, max_speculation_length=0)
    one = request("x", LOOP, **LONG)
    collected = generate(engine, one)
    engines.check_greedy(pair.target, one, collected.ids("x"))
    assert {record.arm for record in chooser.records} <= {NGRAM, PLAIN}
    assert collected.last("x").num_draft_tokens == engine.load().num_ngram_tokens > 0


@pytest.mark.parametrize("backend", engines.BACKENDS)
def test_sampled_outputs_with_n_grams_follow_the_targets_distribution(backend):
    """Outputs whose second token is an n-gram's, drafted, or neither. 20.5: once in 1,000 seeds."""
    target, _ = engines.models("llama")
    first = int(engines.plain_logits(target, PROMPT)[-1].argmax())
    follower = int(engines.plain_logits(target, [*PROMPT, first])[-1].argmax())
    prompt = [*PROMPT[-2:], first, follower, 3, *PROMPT]  # what follows `first` is there to be found
    settings = {"temperature": 1.1, "top_k": 6, "max_tokens": 3, "n": 50, "ignore_eos": True}
    requests = [request(str(at), prompt, **settings, seed=at if at % 2 else None) for at in range(16)]
    engine = ngram_engine(Arms(Arm(2, ngram=True)), max_batch_size=32, backend=backend)
    collected = generate(engine, *requests)
    pairs = [tuple(collected.ids(str(at), index)[:2]) for at in range(16) for index in range(50)]
    firsts = [pair[0] for pair in pairs]
    most = max(set(firsts), key=firsts.count)
    engines.check_counts(Counter(firsts), prompt, target)
    engines.check_counts(Counter(pair[1] for pair in pairs if pair[0] == most), [*prompt, most], target)
    assert engine.load().num_ngram_tokens > 100
