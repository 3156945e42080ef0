"""The end of a sequence, its visible text and its outputs, token by token and in steps of several."""

from __future__ import annotations

from typing import Any

import pytest

from speclen.worker.requests.detokenize import make_decode
from speclen.worker.requests.request import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    SequenceOutput,
    TokenLogprobs,
)
from speclen.worker.requests.sequence import SequenceState
from tests.support import tiny_models

EOS = tiny_models.EOS_ID


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
    )


def encode(text: str) -> list[int]:
    return tiny_models.tokenizer().encode(text)


def run(one: SequenceState, ids: list[int], step: int) -> tuple[list[int], str, SequenceOutput]:
    """Feed ids in steps until the sequence ends; all tokens, all text, and the last output."""
    told: list[int] = []
    text, output = "", None
    for at in range(0, len(ids), step):
        output = one.show(one.append(ids[at : at + step]))
        told += output.token_ids
        text += output.text
        if one.finished:
            break
    assert output is not None
    assert told == one.tokens[one.num_prompt_tokens :]
    assert output.num_completion_tokens == len(told)
    return told, text, output


@pytest.mark.parametrize("step", [1, 2, 3, 9])
class TestEnds:
    def test_at_the_end_token_inside_a_step(self, step: int) -> None:
        ids = [*encode("abc"), EOS, *encode("xyz")]
        told, text, last = run(sequence(), ids, step)
        assert told == [*encode("abc"), EOS]
        assert (text, last.finish_reason, last.matched_stop) == ("abc", FinishReason.STOP, EOS)

    def test_past_the_end_token_when_it_is_ignored(self, step: int) -> None:
        ids = [*encode("abc"), EOS, *encode("xyz")]
        told, text, last = run(sequence(ignore_eos=True, max_tokens=len(ids)), ids, step)
        assert (told, text, last.finish_reason) == (ids, "abcxyz", FinishReason.LENGTH)

    def test_at_a_stop_token_which_is_not_shown(self, step: int) -> None:
        ids = encode("ab!cd")
        told, text, last = run(sequence(stop_token_ids=tuple(encode("!"))), ids, step)
        assert told == encode("ab!")
        assert (text, last.finish_reason, last.matched_stop) == ("ab", FinishReason.STOP, encode("!")[0])

    def test_at_max_tokens(self, step: int) -> None:
        told, _, last = run(sequence(max_tokens=4), [9] * 20, step)
        assert (told, last.finish_reason, last.matched_stop) == ([9] * 4, FinishReason.LENGTH, None)

    def test_at_the_context(self, step: int) -> None:
        one = sequence(context=len(encode("the ")) + 3)
        told, _, last = run(one, [9] * 20, step)
        assert (told, last.finish_reason) == ([9] * 3, FinishReason.LENGTH)

    def test_before_a_stop_string_across_tokens(self, step: int) -> None:
        ids = encode("one two STOP three")
        told, text, last = run(sequence(stop=("never", "STOP")), ids, step)
        assert (text, last.finish_reason, last.matched_stop) == ("one two ", FinishReason.STOP, "STOP")
        decode = make_decode(tiny_models.tokenizer(), True)
        assert "STOP" in decode(told)
        assert "STOP" not in decode(told[:-1])

    def test_after_a_stop_string_that_is_to_be_kept(self, step: int) -> None:
        _, text, _ = run(sequence(stop=("STOP",), include_stop_str_in_output=True), encode("one STOP x"), step)
        assert text == "one STOP"

    def test_with_held_back_text_shown_when_the_stop_string_never_came(self, step: int) -> None:
        ids = encode("one ST")
        _, text, last = run(sequence(stop=("STOP",), max_tokens=len(ids)), ids, step)
        assert (text, last.finish_reason) == ("one ST", FinishReason.LENGTH)

    def test_not_before_min_tokens(self, step: int) -> None:
        ids = encode("a!b!c!")
        assert len(ids) == 6
        told, text, last = run(sequence(stop=("!",), min_tokens=3), ids, step)
        assert (told, text, last.matched_stop) == (ids[:4], "a!b", "!")
        told, _, _ = run(sequence(stop_token_ids=(ids[1],), min_tokens=3), ids, step)
        assert told == ids[:4]

    def test_after_a_stop_string_that_begins_before_min_tokens(self, step: int) -> None:
        ids = encode("a!!b")
        assert len(ids) == 4
        told, text, last = run(sequence(stop=("!!",), min_tokens=2), ids, step)
        assert (told, text, last.matched_stop) == (ids[:3], "a", "!!")

    def test_not_by_a_stop_string_that_was_complete_before_min_tokens(self, step: int) -> None:
        ids = encode("ab!cd!")
        assert len(ids) == 6
        told, text, last = run(sequence(stop=("b!", "ab!cx"), min_tokens=3, max_tokens=6), ids, step)
        assert (told, text, last.finish_reason) == (ids, "ab!cd!", FinishReason.LENGTH)

    def test_whichever_comes_first(self, step: int) -> None:
        ids = [*encode("ab!"), EOS]
        assert run(sequence(stop=("!",)), ids, step)[2].matched_stop == "!"
        assert run(sequence(stop=("!x",)), ids, step)[2].matched_stop == EOS
        assert run(sequence(stop=("!x",)), ids, step)[1] == "ab!"


def test_the_end_token_is_shown_when_special_tokens_are() -> None:
    one = sequence(include_special_tokens=True)
    assert one.show(one.append([*encode("a"), EOS])).text == "a<|endoftext|>"


def test_abort_shows_what_was_held_back() -> None:
    one = sequence(stop=("STOP",))
    assert one.show(one.append(encode("ab ST"))).text == "ab "
    output = one.abort()
    assert (output.text, output.finish_reason, output.token_ids) == ("ST", FinishReason.ABORT, ())


def test_an_unfinished_character_waits_for_its_end() -> None:
    one = sequence()
    ids = encode("🙂")
    assert [one.show(one.append([token])).text for token in ids] == [""] * (len(ids) - 1) + ["🙂"]


def test_log_probabilities_are_cut_with_their_tokens() -> None:
    one = sequence(logprobs=0, max_tokens=2)
    logprobs = [TokenLogprobs(-float(at), (), ()) for at in range(4)]
    assert [entry.logprob for entry in one.show(one.append([5, 6, 7, 8]), logprobs).logprobs] == [0.0, -1.0]
