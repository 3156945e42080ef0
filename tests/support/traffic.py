"""Random traffic on an engine of tiny models, and what all of its outputs must be."""

import random
from dataclasses import dataclass

from speclen.worker.backends.torch.captured_model import Recorder
from speclen.worker.models.loading import ModelPair
from speclen.worker.requests.request import FinishReason, GenerationRequest
from tests.support import engines, tiny_models
from tests.support.engines import Collected, RandomArms, RandomLengths, check_greedy

NUM_REQUESTS = 160


@dataclass
class Traffic:
    """Requests that join at random moments, some of which are cancelled."""

    family: str
    seed: int
    recorder: Recorder | None = None
    num_requests: int = NUM_REQUESTS
    backend: str = "torch"
    ngrams: bool = False
    pair: ModelPair | None = None  # None: the family's usual one

    def run(self) -> tuple[list[GenerationRequest], Collected, RandomLengths]:
        generator = random.Random(self.seed)
        chooser = (RandomArms if self.ngrams else RandomLengths)(self.seed, longest=4)
        engine = engines.make_engine(
            self.pair or engines.make_pair(self.family),
            chooser,
            self.recorder,
            max_recordings=8,
            max_batch_size=6,
            prefill_chunk=17,
            max_kv_tokens=400,
            backend=self.backend,
            ngram=self.ngrams,
        )
        collected, requests, cancelled = Collected(), [], 0
        while len(requests) < self.num_requests or engine.load().num_running or engine.load().num_waiting:
            if len(requests) < self.num_requests and generator.random() < 0.6:
                requests.append(self.make_request(generator, str(len(requests)), self.ngrams))
                engine.submit(requests[-1], collected)
            if generator.random() < 0.1 and requests:
                cancelled += engine.abort(generator.choice(requests[-8:]).request_id)
            engine.step()
        assert engine.load().num_kv_tokens_used == 0
        assert engines.DEVICE.type != "cpu" or engine.target.pool.num_bytes_held() == 0
        assert cancelled > 3, "requests are cancelled, too"
        return requests, collected, chooser

    @staticmethod
    def make_request(generator: random.Random, name: str, repeating: bool = False) -> GenerationRequest:
        make_prompt = engines.repeating_prompt if repeating else engines.random_prompt
        return engines.request(
            name,
            make_prompt(generator, 32),
            fixed_length=generator.choice([None] * 8 + [0, 0, 1, 5]),
            max_tokens=generator.randint(1, 30 if repeating else 14),
        )


def check_outputs(target: object, requests: list[GenerationRequest], collected: Collected) -> None:
    """Check that all are the target's own, and end where they should."""
    num_ties = num_tokens = 0
    for one in requests:
        ids, reason = collected.ids(one.request_id), collected.reason(one.request_id)
        assert reason is not None
        if ids:
            num_ties += check_greedy(target, one, ids)
        num_tokens += len(ids)
        assert tiny_models.EOS_ID not in ids[:-1]
        if reason is FinishReason.LENGTH:
            assert len(ids) == one.sampling.max_tokens
        if reason is FinishReason.STOP:
            assert ids[-1] == tiny_models.EOS_ID
        last = collected.last(one.request_id)
        assert last.num_completion_tokens == len(ids)
        assert last.num_accepted_tokens <= last.num_draft_tokens
        if one.fixed_length == 0:
            assert last.num_draft_tokens == 0
    assert num_ties <= 2
    assert num_tokens > 5 * len(requests)
