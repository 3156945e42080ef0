"""Answers in OpenAI's form from outputs of the engine: one object or a stream of chunks, with log probabilities."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from speclen.worker.http.schema import ChatRequest, NamedTool, Sampling
from speclen.worker.http.translate import CallReader, Job, is_forced
from speclen.worker.requests.detokenize import REPLACEMENT, Decode, make_decode, make_token_bytes
from speclen.worker.requests.request import FinishReason, SequenceOutput, TokenLogprobs, by_sequence, joined

TokenBytes = Callable[[int], bytes | None]
LEAST = -9999.0  # JSON has no -inf, nor NaN
MANY_LOGPROBS = 100  # tokens, each with log probabilities of up to twenty others: some milliseconds to serialise


@dataclass(slots=True)
class Choice:
    """One output of an answer. outputs: of the engine, unless the answer is streamed.

    offset: characters of its tokens so far, each decoded alone. sent_prompt: True once the ids of the prompt were sent.
    calls: set if the output must consist of tool calls.
    """

    index: int
    outputs: list[SequenceOutput] = field(default_factory=list)
    offset: int = 0
    sent_prompt: bool = False
    last: SequenceOutput | None = None
    calls: CallReader | None = None


@dataclass(slots=True)
class SpeculationStatistics:
    """Speculation counts over all sequences of a request, as vLLM reports them. Steps without proposals do not count.

    accepted[j]: steps that accepted and kept exactly j proposed tokens. num_spec_tokens: largest number proposed in a step.
    """

    accepted: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_spec_tokens: int = 0
    _last: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def saw(self, output: SequenceOutput) -> None:
        """Count an output, by how much its totals have grown. Called with every one, in order: each is one step."""
        key = output.request_id, output.index
        drafted_before, accepted_before = self._last.get(key, (0, 0))
        self._last[key] = output.num_draft_tokens, output.num_accepted_tokens
        drafted = output.num_draft_tokens - drafted_before
        if not drafted:
            return
        run = output.num_accepted_tokens - accepted_before
        self.accepted += [0] * (run + 1 - len(self.accepted))
        self.accepted[run] += 1
        self.num_draft_tokens += drafted
        self.num_spec_tokens = max(self.num_spec_tokens, drafted)

    def as_dict(self) -> dict[str, Any]:
        num_steps = sum(self.accepted)
        num_accepted = sum(run * count for run, count in enumerate(self.accepted))
        return {
            "mean_acceptance_length": 1 + num_accepted / num_steps if num_steps else 1.0,
            "draft_acceptance_rate": num_accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0,
            "acceptance_histogram": self.accepted,
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.num_spec_tokens,
        }


class Answer:
    """The answer to one job. tokenizer: for the texts of single tokens in log probabilities."""

    def __init__(self, job: Job, model: str, tokenizer: Any) -> None:
        self.job = job
        self._decode = make_decode(tokenizer, skip_special_tokens=False)
        self._name = token_id_name if job.body.return_tokens_as_token_ids else self._decode
        self._token_bytes = make_token_bytes(tokenizer)
        self._first = {one.request_id: at * job.n for at, one in enumerate(job.requests)}
        self._choices = [Choice(index, calls=call_reader(job.body)) for index in range(job.n * len(job.requests))]
        self._statistics = SpeculationStatistics()
        self._wants_logprobs = job.requests[0].sampling.logprobs is not None
        options = job.body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._head = {"id": job.id, "created": int(time.time()), "model": model}

    # One object.

    def add(self, outputs: Sequence[SequenceOutput]) -> None:
        """Add outputs to the answer."""
        for output in outputs:
            self._note(output).outputs.append(output)

    @property
    def is_large(self) -> bool:
        """True if serialising the answer may take too long for the event loop."""
        return sum(len(one.logprobs) for choice in self._choices for one in choice.outputs) > MANY_LOGPROBS

    def whole(self) -> dict[str, Any]:
        """The answer as one object, once all outputs are added."""
        kind = "chat.completion" if self.job.chat else "text_completion"
        choices = [self._whole_choice(choice) for choice in self._choices]
        prompt = self._prompt_once(self._choices[0]) if self.job.chat else {}
        return self._head | {"object": kind, "choices": choices, "usage": self.usage()} | prompt | self._metrics()

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        output = joined(choice.outputs)
        if choice.calls is not None:
            calls = whole_calls(choice.calls, output.text)
            content: dict[str, Any] = {"message": {"role": "assistant", "content": None, "tool_calls": calls}}
        elif self.job.chat:
            content = {"message": {"role": "assistant", "content": output.text}}
        else:
            content = {"text": output.text} | self._prompt_once(choice)
        return self._common(choice, output) | content

    # Chunks.

    def begin(self) -> Iterator[dict[str, Any]]:
        """Chunks before the first token: in a chat, those with the role."""
        if self.job.chat:
            for choice in self._choices:
                text = "" if choice.calls is None else None
                begun = self._common(choice, None) | {"delta": {"role": "assistant", "content": text}}
                yield self._chunk([begun]) | self._prompt_once(self._choices[0])

    def chunks(self, outputs: Sequence[SequenceOutput]) -> Iterator[dict[str, Any]]:
        """One chunk for each choice with new output."""
        choices = {(output.request_id, output.index): self._note(output) for output in outputs}
        wants_ids = self._wants_logprobs or self.job.body.return_token_ids
        for output in by_sequence(outputs):
            if not (output.text or output.finish_reason or (output.token_ids and wants_ids)):
                continue  # an incomplete character
            choice, text = choices[output.request_id, output.index], output.text
            if choice.calls is not None:
                calls = choice.calls.read(text)
                if not (calls or output.finish_reason or wants_ids):
                    continue  # text between the calls
                content: dict[str, Any] = {"delta": {"tool_calls": calls} if calls else {}}
            elif self.job.chat:
                content = {"delta": {"content": text}}
            else:
                content = {"text": text} | self._prompt_once(choice)
            yield self._chunk([self._common(choice, output) | content])

    def end(self) -> Iterator[dict[str, Any]]:
        """The chunk after the last token, if wanted."""
        if self._usage_at_end or self.job.body.include_metrics:
            usage = {"usage": self.usage()} if self._usage_at_end else {}
            yield self._chunk([]) | usage | self._metrics()

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.job.chat else "text_completion"
        chunk = self._head | {"object": kind, "choices": choices}
        if self._usage_always:
            chunk["usage"] = self.usage()
        elif self._usage_at_end:
            chunk["usage"] = None
        return chunk

    # Both.

    def usage(self) -> dict[str, int]:
        """Numbers of tokens so far. A prompt counts once, however many sequences it has."""
        prompt = sum(len(one.prompt_ids) for one in self.job.requests)
        completion = sum(choice.last.num_completion_tokens for choice in self._choices if choice.last is not None)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _note(self, output: SequenceOutput) -> Choice:
        """The choice that an output belongs to. Called once for every output, in order, which it counts."""
        choice = self._choices[self._first[output.request_id] + output.index]
        choice.last = output
        if self.job.body.include_metrics:
            self._statistics.saw(output)
        return choice

    def _common(self, choice: Choice, output: SequenceOutput | None) -> dict[str, Any]:
        """Fields of a choice that completions and chats have in common. output: None before the first one."""
        reason = None if output is None else output.finish_reason
        fields: dict[str, Any] = {
            "index": choice.index,
            "logprobs": None if output is None else self._logprobs(choice, output),
            "finish_reason": None if reason is None else self._finish_reason(reason),
            "stop_reason": None if output is None else self._stop_reason(output),
        }
        if self.job.body.return_token_ids:
            fields["token_ids"] = [] if output is None else list(output.token_ids)
        return fields

    def _finish_reason(self, reason: FinishReason) -> str:
        """As in OpenAI's API: "tool_calls" if the model chose the function, "stop" if the caller named it."""
        called = reason is FinishReason.STOP and getattr(self.job.body, "tool_choice", None) == "required"
        return "tool_calls" if called else reason.value

    def _prompt_once(self, choice: Choice) -> dict[str, Any]:
        """The ids of the choice's prompt, if wanted and not sent yet; in a chat once, for the first choice."""
        if choice.sent_prompt or not self.job.body.return_token_ids:
            return {}
        choice.sent_prompt = True
        return {"prompt_token_ids": list(self.job.requests[choice.index // self.job.n].prompt_ids)}

    def _stop_reason(self, last: SequenceOutput) -> int | str | None:
        """The stop string or stop token that ended the output; None for the model's end token, as in vLLM."""
        stop = last.matched_stop
        asked_for = self.job.requests[0].sampling.stop_token_ids
        return stop if isinstance(stop, str) or stop in asked_for else None

    def _logprobs(self, choice: Choice, output: SequenceOutput) -> dict[str, Any] | None:
        if not self._wants_logprobs or not output.token_ids:
            return None
        if self.job.chat:
            return chat_logprobs(output.token_ids, output.logprobs, self._decode, self._token_bytes, self._name)
        shape = completion_logprobs(output.token_ids, output.logprobs, self._name, choice.offset)
        choice.offset = shape["text_offset"][-1] + len(shape["tokens"][-1])
        return shape

    def _metrics(self) -> dict[str, Any]:
        if not self.job.body.include_metrics:
            return {}
        return {"metrics": {"speculative_decoding": self._statistics.as_dict()}}


def completion_logprobs(
    ids: Sequence[int], logprobs: Sequence[TokenLogprobs], decode: Decode, offset: int
) -> dict[str, Any]:
    """Log probabilities of a completion: parallel lists with an entry per token. There is at least one token.

    offset: number of characters of the output before the first token. As in vLLM, tokens are decoded one by one, and offsets
    are sums of their lengths.
    """
    tokens = [decode([token]) for token in ids]
    return {
        "tokens": tokens,
        "token_logprobs": [finite(one.logprob) for one in logprobs],
        "top_logprobs": [by_text(text, one, decode) for text, one in zip(tokens, logprobs, strict=True)],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)),
    }


def by_text(token: str, one: TokenLogprobs, decode: Decode) -> dict[str, float]:
    """Log probabilities by text. If tokens have the same text, the entry is that of the chosen token, or the likeliest."""
    entries = {token: finite(one.logprob)}
    for other, logprob in pairs(one):
        entries.setdefault(decode([other]), finite(logprob))
    return entries


def token_id_name(ids: Sequence[int]) -> str:
    """Unique name of a token, since several tokens may have the same text. As in vLLM."""
    return f"token_id:{ids[0]}"


def call_reader(body: Sampling) -> CallReader | None:
    """A reader of tool calls if the output must consist of them; else None."""
    if not isinstance(body, ChatRequest) or not is_forced(body):
        return None
    return CallReader(body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None)


def whole_calls(reader: CallReader, text: str) -> list[dict[str, Any]]:
    """The calls in a complete output, in the form of a message."""
    return [{name: value for name, value in call.items() if name != "index"} for call in reader.read(text)]


def chat_logprobs(
    ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    decode: Decode,
    token_bytes: TokenBytes,
    name: Decode | None = None,
) -> dict[str, Any]:
    """Log probabilities of a chat. token_bytes: gives the bytes of a token that is a part of a character.

    name: gives the name of a token, if it is not its text.
    """

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = decode([token])
        known = token_bytes(token) if REPLACEMENT in text else None
        encoded = text.encode("utf-8", errors="replace") if known is None else known
        named = text if name is None else name([token])
        return {"token": named, "logprob": finite(logprob), "bytes": list(encoded)}

    return {
        "content": [
            entry(token, one.logprob) | {"top_logprobs": [entry(*other) for other in pairs(one)]}
            for token, one in zip(ids, logprobs, strict=True)
        ],
        "refusal": None,
    }


def pairs(one: TokenLogprobs) -> list[tuple[int, float]]:
    return list(zip(one.top_ids, one.top_logprobs, strict=True))


def finite(logprob: float) -> float:
    return max(logprob, LEAST) if math.isfinite(logprob) else LEAST
