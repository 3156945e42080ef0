"""Every greedy output is the target's own, whatever is drafted, batched, cancelled or chunked around it.

A full forward of the target over prompt and output shows it for all tokens at once: by induction, the output is what the
target alone writes if every token is the most likely one after those before it.

Float32 sums depend on the shape of a product in their last bits, so two tokens whose logits differ by less than that are
a tie, which any shape may break its own way. `check_greedy` therefore allows a token whose logit is within 1e-4 of the
largest, and the test counts such tokens: over 10,000 there may be one or two, and every other one is identical.
"""

import random

import pytest

from speclen.records import Arm, StepFlag
from speclen.worker.requests.request import FinishReason
from tests.support import engines, tiny_models
from tests.support.engines import RandomLengths, check_greedy
from tests.support.traffic import Traffic, check_outputs


@pytest.mark.parametrize("backend", engines.BACKENDS)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_changing_arms_generate_what_the_target_alone_would(family, backend):
    """Sequences of one step propose n-grams, drafted tokens or nothing."""
    if backend == "openvino" and family == "gemma2":
        pytest.skip("OpenVINO's attention has no softcap: torch runs Gemma 2")
    seed = 50 + list(tiny_models.FAMILIES).index(family)
    requests, collected, chooser = Traffic(family, seed, backend=backend, ngrams=True).run()
    check_outputs(engines.models(family)[0], requests, collected)
    check_reports(chooser)


def check_reports(chooser: RandomLengths) -> None:
    """Steps were of all kinds, some n-gram tokens were accepted, and every record is consistent."""
    assert {record.batch_size for record in chooser.records} >= {2, 3, 4, 5, 6}
    assert {record.arm.speculation_length for record in chooser.records} >= {0, 1, 2, 3, 4, 5}
    flags = {flag for record in chooser.records for flag in record.flags}
    assert flags >= {StepFlag.PREFILL, StepFlag.CATCH_UP, StepFlag.MIXED_LENGTHS, StepFlag.FIRST_USE}
    for record in chooser.records:
        assert len(record.accepted_histogram) == record.arm.max_tokens + 1
        assert sum(record.accepted_histogram) == record.batch_size
        assert record.num_drafted_sequences <= record.batch_size <= record.num_verified_tokens
        assert record.num_tokens <= record.num_verified_tokens
    alone = [record for record in chooser.records if record.arm == Arm(0, ngram=True)]
    both = [record for record in chooser.records if record.arm.ngram and record.num_drafted_sequences]
    assert sum(record.num_tokens - record.batch_size for record in alone) > 0, (
        "n-grams that are always rejected prove nothing"
    )
    assert sum(record.num_tokens - record.batch_size for record in both) > 8, "nor do drafts that are always rejected"


@pytest.mark.parametrize(("target", "draft"), [("llama", "gpt2"), ("opt", "gemma2"), ("mistral", "gpt_neox")])
def test_target_and_draft_may_be_of_different_families(target, draft):
    pair = engines.make_pair(target, draft=engines.models(draft)[0])
    generator = random.Random(0)
    requests = [Traffic.make_request(generator, str(number)) for number in range(12)]
    collected = engines.generate(engines.make_engine(pair, RandomLengths(3)), *requests)
    for one in requests:
        check_greedy(pair.target, one, collected.ids(one.request_id))


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_sequences_end_exactly_at_the_context(family):
    """Learned positions have no entry beyond the context, so drafts near its end must be shorter."""
    pair = engines.make_pair(family)
    generator = random.Random(1)
    prompts = [[generator.randrange(1, 320) for _ in range(length)] for length in (255, 254, 250, 245, 30)]
    requests = [engines.request(str(at), prompt, max_tokens=100, ignore_eos=True) for at, prompt in enumerate(prompts)]
    collected = engines.generate(engines.make_engine(pair, 6, max_batch_size=5, max_speculation_length=6), *requests)
    for one in requests:
        ids = collected.ids(one.request_id)
        assert len(ids) == min(100, 256 - len(one.prompt_ids))
        assert collected.reason(one.request_id) is FinishReason.LENGTH
        check_greedy(pair.target, one, ids)
