"""Every field of a request is read, values out of range are refused by name, and the limits themselves are allowed."""

import math
from typing import Any

import pytest

from speclen.v1 import generation_pb2 as pb
from speclen.worker.frontend.generation_servicer import to_fixed_length, to_sampling
from speclen.worker.http import translate
from speclen.worker.http.schema import CompletionRequest
from speclen.worker.requests.request import GenerationRequest, SamplingParams, check_request

VOCAB, CONTEXT, LENGTH = 100, 32, 8


def check(prompt: tuple[int, ...] = (1, 2), fixed_length: int | None = None, **sampling: Any) -> None:
    request = GenerationRequest("r", prompt, SamplingParams(**sampling), fixed_length)
    check_request(request, VOCAB, CONTEXT, LENGTH)


@pytest.mark.parametrize(
    ("field", "refused", "allowed"),
    [
        ("temperature", [-0.1, 100.1, math.nan, math.inf], [0.0, 100.0]),
        ("top_p", [0.0, -1.0, 1.01, math.nan], [1.0, 1e-9]),
        ("top_k", [-1], [0, 10**6]),
        ("min_p", [-0.1, 1.1, math.nan], [0.0, 1.0]),
        ("repetition_penalty", [0.0, -1.0, 10.5, math.nan, 1e-39, 0.0099], [10.0, 0.01, 0.009999999776482582]),
        ("presence_penalty", [-10.5, 10.5, math.nan], [-10.0, 10.0]),
        ("frequency_penalty", [-10.5, 10.5, math.nan], [-10.0, 10.0]),
        ("logit_bias", [{100: 1.0}, {-1: 1.0}, {5: 101.0}, {5: math.nan}, {5: -math.inf}], [{0: -100.0, 99: 100.0}]),
        ("max_tokens", [0, -1], [1, 10**6]),
        ("min_tokens", [-1, 129], [128]),
        ("stop", [("",), ("x" * 257,), ("x",) * 65], [("x",) * 64, ("x" * 256,)]),
        ("stop_token_ids", [(100,), (-1,), (1,) * 1025], [(0, 99), (1,) * 1024]),
        ("n", [0, -1, 65, 10**9], [1, 64]),
        ("seed", [-(2**63) - 1, 2**64], [-(2**63), 0, 2**64 - 1]),
        ("logprobs", [-1, 21], [0, 20]),
    ],
)
def test_values_at_the_limits_are_allowed_and_others_name_the_field(field, refused, allowed):
    for value in allowed:
        check(**{field: value})
    for value in refused:
        with pytest.raises(ValueError, match=field):
            check(**{field: value})


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "prompt is empty"),
        ((1,) * CONTEXT, "prompt has 32 tokens.*context of 32"),
        ((1, 100), "prompt token 100 is unknown.*0 to 99"),
        ((1, -3), "prompt token -3 is unknown"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused(prompt, message):
    with pytest.raises(ValueError, match=message):
        check(prompt)
    check((1,) * (CONTEXT - 1))


def test_zero_is_not_absent():
    sampling = to_sampling(pb.SamplingParams(top_p=0.0, max_tokens=0, n=0, seed=0, logprobs=0))
    assert (sampling.top_p, sampling.max_tokens, sampling.n, sampling.seed, sampling.logprobs) == (0.0, 0, 0, 0, 0)


DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}


@pytest.mark.parametrize(
    ("defaults", "given", "over_grpc", "over_http"),
    [
        ({}, {}, (0.0, 0, 1.0), (1.0, 0, 1.0)),
        (DEFAULTS, {}, (0.6, 20, 0.9), (0.6, 20, 0.9)),
        (DEFAULTS, {"temperature": 0.0}, (0.0, 20, 0.9), (0.0, 20, 0.9)),
        (DEFAULTS, {"temperature": 1.0, "top_k": 0, "top_p": 1.0}, (1.0, 0, 1.0), (1.0, 0, 1.0)),
    ],
)
def test_the_models_defaults_apply_to_absent_fields(defaults, given, over_grpc, over_http):
    found = to_sampling(pb.SamplingParams(**given), defaults)
    assert (found.temperature, found.top_k, found.top_p) == pytest.approx(over_grpc)
    found = translate.to_sampling(CompletionRequest(prompt="a", **given), 8, None, defaults)
    assert (found.temperature, found.top_k, found.top_p) == over_http


FIELDS = {"temperature": 0.5, "top_k": 3, "min_p": 0.25, "repetition_penalty": 2.0, "presence_penalty": 1.0}
FIELDS |= {
    "frequency_penalty": 0.5,
    "logit_bias": {7: -1.5},
    "min_tokens": 2,
    "stop": ("a", "b"),
    "stop_token_ids": (5,),
}
FIELDS |= dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "include_special_tokens"), True)


@pytest.mark.parametrize("fields", [{}, FIELDS])
def test_given_fields_are_read_and_absent_ones_keep_their_defaults(fields):
    assert to_sampling(pb.SamplingParams(**fields)) == SamplingParams(**fields)


@pytest.mark.parametrize(
    ("speculation", "length"),
    [
        (pb.Speculation(), None),
        (pb.Speculation(mode=pb.Speculation.MODE_AUTO, length=3), None),
        (pb.Speculation(mode=pb.Speculation.MODE_OFF, length=3), 0),
        (pb.Speculation(mode=pb.Speculation.MODE_FIXED, length=3), 3),
    ],
)
def test_a_speculation_mode_gives_a_fixed_length_or_none(speculation, length):
    assert to_fixed_length(speculation) == length
    with pytest.raises(ValueError, match=r"speculation\.mode 9"):
        to_fixed_length(pb.Speculation(mode=9))
