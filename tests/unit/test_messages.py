"""Absent optional fields mean the default, zero means zero, and a stream's chunks add up to its completion."""

import pytest

from speclen.v1 import generation_pb2 as pb
from speclen.worker.requests.request import SamplingParams
from speclen.worker.service.messages import to_fixed_length, to_request, to_request_id, to_sampling


def test_zero_is_not_absent():
    sampling = to_sampling(pb.SamplingParams(top_p=0.0, max_tokens=0, n=0, seed=0, logprobs=0))
    assert (sampling.top_p, sampling.max_tokens, sampling.n, sampling.seed, sampling.logprobs) == (0.0, 0, 0, 0, 0)


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
def test_every_field_arrives_and_others_keep_their_defaults(fields):
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
def test_speculation_modes(speculation, length):
    assert to_fixed_length(speculation) == length


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (pb.GenerateRequest(text="a", request_id="x" * 129), "request_id"),
        (pb.GenerateRequest(text="a", speculation=pb.Speculation(mode=9)), "speculation.mode"),  # type: ignore[arg-type]
    ],
)
def test_what_is_wrong_is_named(message, word):
    with pytest.raises(ValueError, match=word):
        to_request(message, to_request_id(message), [1])
