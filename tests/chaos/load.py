"""Clients that know the correct answers: greedy outputs of the target alone, as transformers generates them."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import grpc

from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc

MOST_TOKENS = 64
PROMPTS = (
    "def add(a, b):\n    return",
    "import os\nimport sys\n\n\ndef main():",
    "class Queue:\n    def __init__(self, maxsize=0):",
    "for line in file:",
    "    try:\n        return self._values[key]\n    except KeyError:",
    'def read(path):\n    """Read a file."""\n',
    "if __name__ == '__main__':",
    "while True:\n    item = queue.get()",
)


@lru_cache(maxsize=1)
def truth() -> tuple[tuple[int, ...], ...]:
    """The first MOST_TOKENS tokens that the target alone gives for each prompt, by transformers' own `generate`."""
    import torch

    from speclen.worker.models.loading import load_pair

    pair = load_pair("bundled:target", None, "cpu", "float32")
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([pair.tokenizer(prompt).input_ids])
        with torch.inference_mode():
            tokens = pair.target.generate(
                ids, do_sample=False, max_new_tokens=MOST_TOKENS, eos_token_id=None, pad_token_id=0
            )
        outputs.append(tuple(tokens[0, ids.shape[1] :].tolist()))
    return tuple(outputs)


def complaint(prompt: int, max_tokens: int, responses: Sequence[pb.GenerateResponse]) -> str:
    """The fault of an answer; empty if it is the target's own."""
    chunks = [token for each in responses if each.HasField("chunk") for token in each.chunk.token_ids]
    last = responses[-1].complete if responses else pb.GenerateComplete()
    expected = truth()[prompt][:max_tokens]
    if tuple(last.output_ids) != expected:
        return f"prompt {prompt}: {len(last.output_ids)} tokens that are not the target's {max_tokens}"
    if len(responses) > 1 and tuple(chunks) != expected:
        return f"prompt {prompt}: the chunks are not what the last message says"
    return ""


class Load:
    """Clients, each in a thread, that send one request after the other for the length of a `with` block.

    allowed: names of status codes that the fault explains; any other, and any wrong token, breaks the promise.
    """

    def __init__(self, addresses: Sequence[str], num_clients: int, seed: int, allowed: Sequence[str] = ()) -> None:
        self.codes: Counter[str] = Counter()
        self.details: dict[str, str] = {}  # the last by code
        self.wrong: list[str] = []
        self._addresses, self._allowed = list(addresses), set(allowed)
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_until_done, args=(random.Random(seed * 1000 + number),), daemon=True)
            for number in range(num_clients)
        ]

    def __enter__(self) -> Load:
        truth()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(90)
        if kind is None:
            self._check()

    def _check(self) -> None:
        assert not self.wrong, f"{len(self.wrong)} of {self.codes['OK']} answers are wrong, such as {self.wrong[:1]}"
        others = {code: count for code, count in self.codes.items() if code not in {"OK", *self._allowed}}
        assert not others, f"requests ended with {others}: {[self.details[code] for code in others]}"
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"
        assert self.codes["OK"], "not one request was answered"

    def _ask_until_done(self, dice: random.Random) -> None:
        channels = [grpc.insecure_channel(address) for address in self._addresses]
        while not self._done.is_set():
            self._ask(dice.choice(channels), dice)
            time.sleep(dice.uniform(0, 0.04))
        for channel in channels:
            channel.close()

    def _ask(self, channel: grpc.Channel, dice: random.Random) -> None:
        prompt, max_tokens = dice.randrange(len(PROMPTS)), dice.randint(1, MOST_TOKENS)
        sampling = pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = pb.GenerateRequest(text=PROMPTS[prompt], stream=dice.random() < 0.7, sampling_params=sampling)
        try:
            responses = list(rpc.GenerationServiceStub(channel).Generate(request, timeout=60))
        except grpc.RpcError as error:
            self.codes[error.code().name] += 1
            self.details[error.code().name] = error.details() or ""
            time.sleep(0.05)
            return
        self.codes["OK"] += 1
        if wrong := complaint(prompt, max_tokens, responses):
            self.wrong.append(wrong)

    def summary(self) -> str:
        failed = {code: count for code, count in self.codes.items() if code != "OK"}
        return f"{self.codes['OK']} answers, each the target's own" + (f", apart from {failed}" if failed else "")
