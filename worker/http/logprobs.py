"""Log probabilities in the two shapes that OpenAI's API has for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from speclen.worker.requests.detokenize import REPLACEMENT, Decode
from speclen.worker.requests.request import TokenLogprobs

TokenBytes = Callable[[int], bytes | None]
LEAST = -9999.0  # JSON has no -inf, nor NaN


def completion_logprobs(
    ids: Sequence[int], logprobs: Sequence[TokenLogprobs], decode: Decode, offset: int
) -> dict[str, Any]:
    """Parallel lists, one entry a token. offset: characters of the output before the first of them.

    As in vLLM, tokens are decoded one by one, and offsets are sums of their lengths.
    """
    tokens = [decode([token]) for token in ids]
    offsets, at = [], offset
    for token in tokens:
        offsets.append(at)
        at += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [finite(one.logprob) for one in logprobs],
        "top_logprobs": [by_text(text, one, decode) for text, one in zip(tokens, logprobs, strict=True)],
        "text_offset": offsets,
    }


def by_text(token: str, one: TokenLogprobs, decode: Decode) -> dict[str, float]:
    """Log probabilities by text. Tokens of one text share an entry: the chosen token's, or the likeliest."""
    entries = {token: finite(one.logprob)}
    for other, logprob in pairs(one):
        entries.setdefault(decode([other]), finite(logprob))
    return entries


def chat_logprobs(
    ids: Sequence[int], logprobs: Sequence[TokenLogprobs], decode: Decode, token_bytes: TokenBytes
) -> dict[str, Any]:
    """Entries of a chat. token_bytes: of a token that is a part of a character; clients join the bytes of several."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = decode([token])
        known = token_bytes(token) if REPLACEMENT in text else None
        told = text.encode("utf-8", errors="replace") if known is None else known
        return {"token": text, "logprob": finite(logprob), "bytes": list(told)}

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
