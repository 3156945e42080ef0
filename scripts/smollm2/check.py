"""Check a checkpoint that `convert.py` wrote against its GGUF, and speclen's engine against transformers on it.

    PYTHONPATH=build/smollm2/packages:scripts/peers python scripts/smollm2/check.py FILE.gguf FOLDER

Weights: equal to those of the file, dequantised here, in every bit. Tokens: text comes back, and every digit is a token.
Answers: greedy ones in float32 have the same tokens by transformers and by the engine, without and with n-grams.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file
from to_gguf import gguf_name, to_interleaved
from transformers import AutoModelForCausalLM, AutoTokenizer

from speclen.records import PLAIN, Arm, parse_arm
from speclen.worker.drafting.arm_chooser import FixedArm
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.models.loading import load_pair
from speclen.worker.requests.request import GenerationRequest, SamplingParams, SequenceOutput

TEXT = "In 1969, 2 people walked on the Moon;\n\tdef f(x):\n    return x + 1234.5  # naïve café 北京 🙂"
QUESTIONS = (
    "Why is the sky blue?",
    "Write three short rules for a library.",
    "What is 17 plus 25? Answer with the number.",
    "Repeat this list and add one fruit: apple, pear, plum, cherry.",
)
MAX_TOKENS = 64


def dequantised(tensor: gguf.ReaderTensor) -> np.ndarray:
    """Weights of a tensor. Raises ValueError for a format that SmolLM2's file does not use."""
    shape, data = tensor.shape[::-1], tensor.data
    if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
        return data.reshape(shape)
    if tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0:  # a scale, then 32 weights of 8 bits
        blocks = data.reshape(-1, 34)
        scale = blocks[:, :2].view(np.float16).astype(np.float32)
        return (scale * blocks[:, 2:].view(np.int8)).reshape(shape)
    if tensor.tensor_type == gguf.GGMLQuantizationType.Q4_1:  # scale and offset, then 32 weights of 4 bits
        blocks = data.reshape(-1, 20)
        scale, offset = (blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2))
        numbers = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
        return (scale * numbers + offset).reshape(shape)
    raise ValueError(f"{tensor.name} is of type {tensor.tensor_type.name}, which is not known here")


def check_weights(file: Path, folder: Path) -> str:
    """Raises ValueError naming a tensor that differs."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    config = json.loads((folder / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in load_file(folder / "model.safetensors").items():
        expected = dequantised(tensors.pop(gguf_name(name)))
        num_heads = heads.get(name.split(".")[-2])
        found = to_interleaved(weight, num_heads) if num_heads else weight
        if not np.array_equal(found, expected):
            raise ValueError(f"{name} is not what the file holds")
    if tensors:
        raise ValueError(f"{len(tensors)} tensors of the file are missing, {min(tensors)} among them")
    return "weights: equal to the file's, dequantised"


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
    answers: dict[str, list[int]] = {}
    ended = []

    def take(output: SequenceOutput) -> None:
        answers.setdefault(output.request_id, []).extend(output.token_ids)
        ended.extend([output] if output.finish_reason else [])

    for number, prompt in enumerate(prompts):
        engine.submit(GenerationRequest(str(number), tuple(prompt), SamplingParams(max_tokens=MAX_TOKENS)), take)
    while len(ended) < len(prompts):
        engine.step()
    return [answers[str(number)] for number in range(len(prompts))]


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


def main(file: Path, folder: Path) -> None:
    """Exits 1 with one sentence where a check fails."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    try:
        print(check_weights(file, folder))
        print(check_tokenizer(tokenizer))
        print(check_answers(folder, tokenizer))
    except ValueError as error:
        raise SystemExit(f"real_model: {error}") from None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
