"""Write a Llama-style GGUF as a checkpoint with a chat template, and check speclen's engine against transformers on it.

    PYTHONPATH=build/smollm2/packages python scripts/smollm2/make.py FILE.gguf FOLDER

Weights: float32. Tokens: text comes back, and every digit is a token. Answers: greedy ones have the same tokens by
transformers and by the engine, without and with n-grams.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from speclen.bench.engine.run import generate
from speclen.records import PLAIN, Arm, parse_arm
from speclen.worker.drafting.arm_chooser import FixedArm
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.models.loading import load_pair
from speclen.worker.requests.request import SamplingParams

TEXT = "In 1969, 2 people walked on the Moon;\n\tdef f(x):\n    return x + 1234.5  # naïve café 北京 🙂"
QUESTIONS = (
    "Why is the sky blue?",
    "Write three short rules for a library.",
    "What is 17 plus 25? Answer with the number.",
    "Repeat this list and add one fruit: apple, pear, plum, cherry.",
)
MAX_TOKENS = 64


def convert(gguf: Path, folder: Path) -> None:
    """Raises OSError or ValueError for a file that cannot be read."""
    place, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    # The file names its pre-tokenizer `smollm`, which transformers does not know: every digit is a token.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, quantization_config=config, dtype="float32")
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_tokenizer(tokenizer: Any) -> str:
    """Raises ValueError for text that does not come back, or digits that share a token."""
    ids = tokenizer(TEXT)["input_ids"]
    if tokenizer.decode(ids) != TEXT:
        raise ValueError(f"{TEXT!r} comes back as {tokenizer.decode(ids)!r}")
    digits = [token for token in tokenizer.convert_ids_to_tokens(ids) if any(one.isdigit() for one in token)]
    if any(len(token) > 1 for token in digits):
        raise ValueError(f"digits share tokens: {digits}")
    return "tokens: text comes back, digits are apart"


def by_transformers(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers, end token included."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS)
        answers.append(found[0, len(prompt) :].tolist())
    return answers


def by_engine(folder: Path, prompts: list[list[int]], arm: Arm) -> list[list[int]]:
    """Greedy answers to all prompts at once, end token included."""
    pair = load_pair(str(folder), None, "cpu", "float32")
    config = EngineConfig(max_batch_size=len(prompts), ngram=arm != PLAIN, max_context_length=512, backend="torch")
    engine = Engine(pair, config, FixedArm(arm))
    return generate(engine, prompts, [MAX_TOKENS] * len(prompts), sampling=SamplingParams())


def check_answers(folder: Path, tokenizer: Any) -> str:
    """Raises ValueError naming the question whose answers differ."""
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(one, add_generation_prompt=True)["input_ids"] for one in asked]
    expected = by_transformers(folder, prompts)
    for arm in (PLAIN, parse_arm("n-gram")):
        for question, wanted, found in zip(QUESTIONS, expected, by_engine(folder, prompts, arm), strict=True):
            if found != wanted:
                raise ValueError(
                    f"{question!r} by the engine ({arm}): {tokenizer.decode(found)!r}, not {tokenizer.decode(wanted)!r}"
                )
    shown = "\n".join(f"  {q}\n    {tokenizer.decode(a)!r}" for q, a in zip(QUESTIONS, expected, strict=True))
    return f"answers: the same tokens by transformers and by the engine, {MAX_TOKENS} at most\n{shown}"


def main(gguf: Path, folder: Path) -> None:
    """Exits 1 with one sentence where a check fails."""
    convert(gguf, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    try:
        print(check_tokenizer(tokenizer))
        print(check_answers(folder, tokenizer))
    except ValueError as error:
        raise SystemExit(f"real_model: {error}") from None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
