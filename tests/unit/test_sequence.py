"""A sequence's end, its visible text and its outputs, token by token and in steps of several tokens."""

from typing import Any

import pytest

from speclen.worker.requests.detokenize import make_decode, special_texts
from speclen.worker.requests.request import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    SequenceOutput,
    TokenLogprobs,
)
from speclen.worker.requests.sequence import SequenceState
from tests.support import tiny_models

EOS, END = tiny_models.EOS_ID, "<|endoftext|>"
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def sequence(prompt: str = "the ", context: int = 200, **sampling: Any) -> SequenceState:
    skip = not sampling.get("include_special_tokens", False)
    return SequenceState(
        GenerationRequest("r", tuple(encode(prompt)), SamplingParams(**sampling)),
        0,
        lambda output: None,
        decode=make_decode(tiny_models.tokenizer(), skip),
        eos_token_ids=(EOS,),
        max_context_length=context,
        draft_context_length=context,
        hidden=special_texts(tiny_models.tokenizer()) if skip else {},
    )


def encode(text: str) -> list[int]:
    return tiny_models.tokenizer().encode(text)


def run(one: SequenceState, ids: list[int], step: int) -> tuple[list[int], str, SequenceOutput]:
    """Feed ids in steps until the sequence ends; all tokens, all text, and the last output."""
    told: list[int] = []
    text, output = "", None
    for at in range(0, len(ids), step):
        output = one.output(one.append(ids[at : at + step]))
        told += output.token_ids
        text += output.text
        if one.finished:
            break
    assert told == one.tokens[one.num_prompt_tokens :]
    assert output.num_completion_tokens == len(told)
    return told, text, output


ABC, LATE, SHOUTED, WORDS = encode("abc"), encode("a!b!c!"), encode("a!!b"), encode("one two STOP three")
SHOUT, LONG, XYZ = encode("!")[0], [9] * 20, encode("xyz")
UNTIL_STOP = next(WORDS[:at] for at in range(len(WORDS)) if "STOP" in tiny_models.tokenizer().decode(WORDS[:at]))

GO_ON, KEEP, SHOW = {"ignore_eos": True}, {"include_stop_str_in_output": True}, {"include_special_tokens": True}
ENDED, WHOLE = [*ABC, EOS], [*ABC, EOS, *XYZ]
TO_X, BEFORE_END = [*ABC, EOS, XYZ[0]], [*LATE[:2], EOS]
AROUND = f"c{END}x"

# Sampling, tokens that come, tokens of the output, its text, and what ends it; None: any.
ENDS = {
    "the end token": ({}, WHOLE, ENDED, "abc", STOP, EOS),
    "the end token, which is shown": (SHOW, ENDED, None, "abc" + END, STOP, EOS),
    "not an end token that is ignored": (GO_ON | {"max_tokens": len(WHOLE)}, WHOLE, WHOLE, "abcxyz", LENGTH, None),
    "a stop token, which is not shown": ({"stop_token_ids": (SHOUT,)}, LATE, LATE[:2], "a", STOP, SHOUT),
    "max_tokens": ({"max_tokens": 4}, LONG, LONG[:4], None, LENGTH, None),
    "the context": ({"context": len(encode("the ")) + 3}, LONG, LONG[:3], None, LENGTH, None),
    "a stop string across tokens": ({"stop": ("never", "STOP")}, WORDS, UNTIL_STOP, "one two ", STOP, "STOP"),
    "a stop string that is kept": (KEEP | {"stop": ("STOP",)}, WORDS, UNTIL_STOP, "one two STOP", STOP, "STOP"),
    "text held back for a stop string that never came": (
        *({"stop": ("STOP",), "max_tokens": len(encode("one ST"))}, encode("one STx"), None, "one ST", LENGTH, None),
    ),
    "a stop string after min_tokens": ({"stop": ("!",), "min_tokens": 3}, LATE, LATE[:4], "a!b", STOP, "!"),
    "a stop token after min_tokens": ({"stop_token_ids": (SHOUT,), "min_tokens": 3}, LATE, LATE[:4], None, STOP, SHOUT),
    "a stop string begun before min_tokens": (
        {"stop": ("!!",), "min_tokens": 2},
        SHOUTED,
        SHOUTED[:3],
        "a",
        STOP,
        "!!",
    ),
    "not a stop string complete before min_tokens": (
        *({"stop": ("a!", "a!bx"), "min_tokens": 3, "max_tokens": 6}, LATE, LATE, "a!b!c!", LENGTH, None),
    ),
    "a special token as stop string": (GO_ON | {"stop": (END,)}, WHOLE, ENDED, "abc", STOP, END),
    "one that is kept": (GO_ON | KEEP | {"stop": (END,)}, WHOLE, ENDED, "abc" + END, STOP, END),
    "one that is shown": (GO_ON | SHOW | {"stop": (END,)}, WHOLE, ENDED, "abc", STOP, END),
    "a stop string around a special token": (GO_ON | {"stop": (AROUND,)}, WHOLE, TO_X, "ab", STOP, AROUND),
    "a stop string that the end token completes": ({"stop": (f"c{END}",)}, ENDED, None, "ab", STOP, f"c{END}"),
    "a stop string around a special token that is left out": (GO_ON | {"stop": ("cx",)}, WHOLE, TO_X, "ab", STOP, "cx"),
    "not a part of a special token that is left out": (
        *(GO_ON | {"stop": ("endoftext", "|>"), "max_tokens": len(WHOLE)}, WHOLE, WHOLE, "abcxyz", LENGTH, None),
    ),
    "text held back for a special token that never came": (
        *(GO_ON | {"stop": (f"c{END}!",), "max_tokens": len(ENDED)}, WHOLE, ENDED, "abc", LENGTH, None),
    ),
    "the end token before a stop string": ({"stop": ("!x",)}, BEFORE_END, BEFORE_END, "a!", STOP, EOS),
}


@pytest.mark.parametrize("step", [1, 2, 3, 9])
@pytest.mark.parametrize("end", ENDS)
def test_a_sequence_ends_where_it_should(end, step):
    sampling, ids, told, text, reason, matched = ENDS[end]
    found_ids, found_text, last = run(sequence(**sampling), ids, step)
    assert (last.finish_reason, last.matched_stop) == (reason, matched)
    assert told in (None, found_ids)
    assert text in (None, found_text)


def test_abort_shows_what_was_held_back():
    one = sequence(stop=("STOP",))
    assert one.output(one.append(encode("ab ST"))).text == "ab "
    output = one.abort()
    assert (output.text, output.finish_reason, output.token_ids) == ("ST", FinishReason.ABORT, ())


def test_log_probabilities_are_cut_with_their_tokens():
    one = sequence(logprobs=0, max_tokens=2)
    logprobs = [TokenLogprobs(-float(at), (), ()) for at in range(4)]
    assert [entry.logprob for entry in one.output(one.append([5, 6, 7, 8]), logprobs).logprobs] == [0.0, -1.0]
