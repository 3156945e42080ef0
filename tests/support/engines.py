"""Engines on tiny models, and their outputs, for the engine's tests."""

import functools
import os
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from speclen.records import Arm, StepRecord
from speclen.worker.arms import ArmChoice, ArmChooser, FixedArm
from speclen.worker.backends import openvino
from speclen.worker.backends.torch.captured_model import Recorder
from speclen.worker.backends.torch.packed_linear import private_copy
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.engine.preparation import prepare
from speclen.worker.models.loading import ModelPair
from speclen.worker.requests.request import FinishReason, GenerationRequest, SamplingParams, SequenceOutput
from tests.support import tiny_models

CPU = torch.device("cpu")
PROMPT = tiny_models.tokenizer().encode("The target verifies what")
LOOP = [5, 6, 7, 8] * 5  # n-grams match
LONG = {"max_tokens": 30, "ignore_eos": True}
# The engine's own tests can go to another device: SPECLEN_TEST_DEVICE=cuda.
DEVICE = torch.device(os.environ.get("SPECLEN_TEST_DEVICE", "cpu"))
WHY_NOT_OPENVINO = openvino.why_not(DEVICE, torch.float32)
BACKENDS = [
    "torch",
    pytest.param(
        "openvino", marks=pytest.mark.skipif(WHY_NOT_OPENVINO is not None, reason=f"OpenVINO: {WHY_NOT_OPENVINO}")
    ),
]


@functools.cache
def models(family: str, noise: float = 0.1) -> tuple[Any, Any]:
    with torch.inference_mode(False):  # the models may later run outside of inference mode
        target = tiny_models.build(family)
        draft = tiny_models.noisy_copy(target, noise)
        return target.to(DEVICE), draft.to(DEVICE)


def make_pair(family: str = "llama", noise: float = 0.1, draft: Any | None = None, **changes: Any) -> ModelPair:
    """A target and a draft that often agrees; `draft` instead of it, if given."""
    target, usual_draft = models(family, noise)
    settings = {
        "target": target,
        "draft": draft if draft is not None else usual_draft,
        "tokenizer": tiny_models.tokenizer(),
        "target_name": family,
        "draft_name": "draft",
        "device": DEVICE,
        "dtype": torch.float32,
        "eos_token_ids": (tiny_models.EOS_ID,),
        "max_context_length": tiny_models.MAX_POSITIONS,
        "vocab_size": tiny_models.VOCAB_SIZE,
    }
    return ModelPair(**(settings | changes))


@dataclass
class RandomLengths:
    """Another length at every step, 0 included; keeps the records."""

    seed: int = 0
    longest: int = 6
    records: list[StepRecord] = field(default_factory=list)
    wants_evaluations: bool = False

    def __post_init__(self) -> None:
        self.generator = random.Random(self.seed)

    def choose(self, batch_size: int, with_prefill: bool = False) -> ArmChoice:
        return ArmChoice(Arm(self.generator.choice([0, 0, *range(self.longest + 1)])), decision_version=7)

    def report(self, record: StepRecord) -> None:
        self.records.append(record)


@dataclass
class RandomArms(RandomLengths):
    """Another arm at every step: plain, drafting, n-grams, and both."""

    def choose(self, batch_size: int, with_prefill: bool = False) -> ArmChoice:
        drafted = self.generator.randint(1, self.longest)
        arms = [Arm(), Arm(drafted), Arm(0, ngram=True), Arm(drafted, ngram=True)]
        return ArmChoice(self.generator.choice(arms), decision_version=7)


class Arms:
    """One arm after the other, the last one for good; keeps the records."""

    def __init__(self, *arms: Arm, wants_evaluations: bool = False) -> None:
        self.arms, self.wants_evaluations = list(arms), wants_evaluations
        self.records: list[StepRecord] = []

    def choose(self, batch_size: int, with_prefill: bool = False) -> ArmChoice:
        return ArmChoice(self.arms.pop(0) if len(self.arms) > 1 else self.arms[0])

    def report(self, record: StepRecord) -> None:
        self.records.append(record)


@dataclass
class Collected:
    """Outputs by request and index."""

    outputs: dict[tuple[str, int], list[SequenceOutput]] = field(default_factory=lambda: defaultdict(list))

    def __call__(self, output: SequenceOutput) -> None:
        told = self.outputs[output.request_id, output.index]
        assert not told or told[-1].finish_reason is None, "nothing follows the last output"
        told.append(output)

    def ids(self, request_id: str, index: int = 0) -> list[int]:
        return [token for output in self.outputs[request_id, index] for token in output.token_ids]

    def text(self, request_id: str, index: int = 0) -> str:
        return "".join(output.text for output in self.outputs[request_id, index])

    def last(self, request_id: str, index: int = 0) -> SequenceOutput:
        return self.outputs[request_id, index][-1]

    def reason(self, request_id: str, index: int = 0) -> FinishReason | None:
        return self.last(request_id, index).finish_reason


def make_engine(
    pair: ModelPair | None = None,
    chooser: ArmChooser | int = 3,
    recorder: Recorder | None = None,
    overlapped: bool | None = None,
    **settings: Any,
) -> Engine:
    """An engine with 4 slots and without model checks, since one test checks every family.

    overlapped: run steps as on an asynchronous device; None: as the backend does.
    """
    chooser = FixedArm(Arm(chooser)) if isinstance(chooser, int) else chooser
    defaults: dict[str, Any] = {"max_batch_size": 4, "check_models": False, "seed": 1, "backend": "torch"}
    defaults["record_ahead_s"] = 0.0
    pair, config = pair or make_pair(), EngineConfig(**(defaults | settings))
    prepared = prepare(pair, config, recorder)
    prepared.target.asynchronous = prepared.target.asynchronous if overlapped is None else overlapped
    return Engine(pair, config, chooser, prepared)


def request(
    name: str, prompt: list[int] | tuple[int, ...], fixed_length: int | None = None, **sampling: Any
) -> GenerationRequest:
    return GenerationRequest(name, tuple(prompt), SamplingParams(**sampling), fixed_length)


def finish(engine: Engine, max_steps: int = 20_000) -> None:
    """Step until nothing is left to do."""
    for _ in range(max_steps):
        load = engine.load()
        if not load.num_running and not load.num_waiting:
            return
        engine.step()
    raise AssertionError(f"not done after {max_steps} steps")


def generate(engine: Engine, *requests: GenerationRequest) -> Collected:
    """All outputs of these requests, run together."""
    collected = Collected()
    for one in requests:
        engine.submit(one, collected)
    finish(engine)
    return collected


def repeating_prompt(generator: random.Random, longest: int = 40) -> list[int]:
    """Pieces that come again, some often: there is always an n-gram match, mostly in vain."""
    pieces = [random_prompt(generator, 4) for _ in range(generator.randint(1, 3))]
    prompt = [token for _ in range(12) for token in generator.choice(pieces)]
    return prompt[: generator.randint(1, longest)]


def random_prompt(generator: random.Random, longest: int = 40) -> list[int]:
    return [generator.randrange(1, tiny_models.VOCAB_SIZE) for _ in range(generator.randint(1, longest))]


@torch.no_grad()
def plain_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of the model alone, in transformers' own attention."""
    return eager(model)(input_ids=torch.tensor([ids], device=DEVICE), use_cache=False).logits[0].float().cpu()


@functools.lru_cache(maxsize=8)
def eager(model: Any) -> Any:
    """The model in transformers' own attention, with the same weights."""
    ours = private_copy(model)
    ours.set_attn_implementation("eager")
    return ours


def check_greedy(model: object, one: GenerationRequest, ids: list[int]) -> int:
    """Assert that ids are the target's own greedy choice; returns how many of them broke a tie the other way."""
    tokens = [*one.prompt_ids, *ids]
    logits = plain_logits(model, tokens)[len(one.prompt_ids) - 1 : -1]
    best = logits.max(dim=-1).values
    ties = 0
    for at, token in enumerate(ids):
        if token != int(logits[at].argmax()):
            gap = float(best[at] - logits[at, token])
            assert gap < 1e-4, f"{one.request_id}: token {at} is {token}, {gap} below the target's choice"
            ties += 1
    return ties


def check_counts(counts: Counter[int], context: list[int], target: object) -> None:
    """Chi-square of the counts against the target's own 6 most likely tokens."""
    logits = plain_logits(target, context)[-1]
    top = logits.topk(6)
    expected = torch.softmax(top.values / 1.1, 0) * sum(counts.values())
    assert set(counts) <= set(top.indices.tolist())
    found = torch.tensor([float(counts[token]) for token in top.indices.tolist()])
    assert float(((found - expected) ** 2 / expected).sum()) < 20.5
