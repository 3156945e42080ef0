"""Tiny random models of every family, with one small tokenizer, for tests that need real transformers code.

A model of a few thousand parameters runs a forward in about a millisecond. Weights are drawn wide enough that greedy
outputs vary with the prompt instead of settling on one token.
"""

import copy
import functools
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 320
EOS_ID = 0
MAX_POSITIONS = 256
SLIDING_WINDOW = 16  # Shorter than most test sequences, so that a forgotten window shows.

_LAYERED = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
}
GROUPED = {**_LAYERED, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
_GEMMA = {**GROUPED, "sliding_window": SLIDING_WINDOW, "query_pre_attn_scalar": 8}
_GEMMA["layer_types"] = ["sliding_attention", "full_attention"]

# Family name -> (model type of transformers, configuration).
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", GROUPED),
    "opt": ("opt", {**_LAYERED, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "gpt2": ("gpt2", {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": MAX_POSITIONS}),
    "gpt_neox": ("gpt_neox", {**_LAYERED, "intermediate_size": 64}),
    "qwen2": ("qwen2", {**GROUPED, "head_dim": 8}),
    "qwen3": ("qwen3", GROUPED),
    "mistral": ("mistral", {**GROUPED, "sliding_window": SLIDING_WINDOW}),
    "gemma2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", _GEMMA),
}


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 320 tokens, `<|endoftext|>` is 0: any text survives encoding and decoding."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "The target verifies what the draft proposes; the draft proposes what the target would have written. " * 4
    bpe.train_from_iterator([text, "def step(self, batch):\n    return self.engine.step(batch)\n" * 4], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
    assert len(fast) == VOCAB_SIZE
    return fast


def build(family: str, seed: int = 0, **overrides: object) -> torch.nn.Module:
    """A random float32 model of one family in eval mode; overrides are its configuration, or change that from above.

    The same family, seed and overrides give the same weights.
    """
    model_type, settings = FAMILIES.get(family, (family, {}))
    # Not tied: a random model with tied embeddings mostly repeats its last token.
    tokens = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID, "bos_token_id": None, "pad_token_id": None}
    tokens["tie_word_embeddings"] = False
    config = AutoConfig.for_model(model_type, **(tokens | settings | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        _draw_wide(model)
    return model


@torch.no_grad()
def _draw_wide(model: torch.nn.Module) -> None:
    """Redraw weights around 1/sqrt(inputs) and biases around 0.1: the default 0.02 gives nearly flat logits."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
        elif name.endswith("bias"):
            parameter.normal_(std=0.1)


@torch.no_grad()
def noisy_copy(model: torch.nn.Module, noise: float = 0.1, seed: int = 1) -> torch.nn.Module:
    """A draft that often agrees with `model`: its weights plus noise, as a share of each matrix's deviation."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        if parameter.ndim == 2:
            parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return draft


def save(model: torch.nn.Module, folder: Path, with_tokenizer: bool = True) -> str:
    """Write model and tokenizer as load_pair expects them; returns the folder as a string."""
    model.save_pretrained(folder)
    if with_tokenizer:
        tokenizer().save_pretrained(folder)
    return str(folder)


def save_pair(family: str, folder: Path, noise: float = 0.1, **overrides: object) -> tuple[str, str]:
    """Folders of a target and a draft that often agrees with it."""
    target = build(family, **overrides)
    return save(target, folder / "target"), save(noisy_copy(target, noise), folder / "draft")
