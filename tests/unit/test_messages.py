"""Absent optional fields mean the default, zero means zero, and a stream's chunks add up to its completion."""

import pytest

from speclen.v1 import generation_pb2 as pb
from speclen.worker.requests.request import FinishReason, SamplingParams, SequenceOutput, TokenLogprobs
from speclen.worker.service.messages import SequenceMessages, to_fixed_length, to_request, to_request_id, to_sampling


def test_absent_fields_keep_their_defaults():
    assert to_sampling(pb.SamplingParams()) == SamplingParams()


def test_zero_is_not_absent():
    sampling = to_sampling(pb.SamplingParams(top_p=0.0, max_tokens=0, n=0, seed=0, logprobs=0))
    assert (sampling.top_p, sampling.max_tokens, sampling.n, sampling.seed, sampling.logprobs) == (0.0, 0, 0, 0, 0)


def test_every_field_arrives():
    message = pb.SamplingParams(
        temperature=0.5,
        top_k=3,
        min_p=0.25,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logit_bias={7: -1.5},
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[5],
        ignore_eos=True,
        include_stop_str_in_output=True,
        include_special_tokens=True,
    )
    expected = SamplingParams(
        temperature=0.5,
        top_k=3,
        min_p=0.25,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logit_bias={7: -1.5},
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=(5,),
        ignore_eos=True,
        include_stop_str_in_output=True,
        include_special_tokens=True,
    )
    assert to_sampling(message) == expected


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


def test_id_and_token_ids_arrive():
    tokenized = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[3, 1]), request_id="x")
    request = to_request(tokenized, to_request_id(tokenized), tokenized.tokenized.input_ids)
    assert (request.prompt_ids, request.request_id) == ((3, 1), "x")


def test_ids_are_made_up_when_missing():
    first, second = (to_request_id(pb.GenerateRequest(text="a")) for _ in range(2))
    assert first
    assert first != second


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


def test_chunks_add_up_to_the_completion():
    logprob = TokenLogprobs(-0.5, (1, 2), (-0.5, -1.0))
    outputs = [
        SequenceOutput(
            "r", 1, (4, 5), "ab", (logprob, logprob), num_prompt_tokens=3, num_completion_tokens=2, num_steps=1
        ),
        SequenceOutput("r", 1, (6,), "c", (logprob,), num_prompt_tokens=3, num_completion_tokens=3, num_steps=2),
        SequenceOutput(
            "r",
            1,
            (7,),
            "",
            (logprob,),
            finish_reason=FinishReason.STOP,
            matched_stop="d",
            num_prompt_tokens=3,
            num_completion_tokens=4,
            num_steps=3,
            num_draft_tokens=6,
            num_accepted_tokens=1,
        ),
    ]
    messages = SequenceMessages("r", 1)
    messages.add(outputs)
    chunks = [messages.chunk(outputs[:2]).chunk, messages.chunk(outputs[2:]).chunk]
    complete = messages.complete(outputs[-1]).complete
    assert [t for chunk in chunks for t in chunk.token_ids] == list(complete.output_ids) == [4, 5, 6, 7]
    assert "".join(chunk.text for chunk in chunks) == complete.text == "abc"
    assert len(complete.logprobs) == 4
    assert complete.matched_stop_string == "d"
    assert complete.finish_reason == pb.FINISH_REASON_STOP
    assert (complete.usage.prompt_tokens, complete.usage.completion_tokens) == (3, 4)
    assert (complete.speculation.num_steps, complete.speculation.num_draft_tokens) == (3, 6)
