"""Write a Llama-style checkpoint with a byte-level BPE tokenizer as GGUF, for llama.cpp's server.

Norms become float32, as llama.cpp expects; other weights keep their dtype.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file


def to_interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of llama.cpp's rotary embedding.

    Transformers rotates the first half of a head against the second, llama.cpp neighbouring pairs. weight: [out, in].
    """
    head_dim = weight.shape[0] // num_heads
    halves = weight.reshape(num_heads, 2, head_dim // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def add_hyperparameters(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, size: int) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    by_id = {index: token for token, index in tokenizer["model"]["vocab"].items()} | special
    kinds = [gguf.TokenType.NORMAL if index in by_id else gguf.TokenType.UNUSED for index in range(size)]
    for index in special:
        kinds[index] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")  # byte-level BPE with single digits
    writer.add_token_list([by_id.get(index, f"<unused{index}>") for index in range(size)])
    writer.add_token_types(kinds)
    writer.add_add_bos_token(False)
    gguf.SpecialVocab(folder, load_merges=True, special_token_types=("eos",)).add_to_gguf(writer, quiet=True)


def add_tensors(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    heads, names = (
        config["num_attention_heads"],
        gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"]),
    )
    interleaved = {"q_proj": heads, "k_proj": config.get("num_key_value_heads") or heads}
    tensors = load_file(folder / "model.safetensors")
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    for name, tensor in tensors.items():
        in_half = tensor.dtype == torch.bfloat16  # which numpy lacks
        values = (tensor.view(torch.int16) if in_half else tensor).numpy()
        if num_heads := interleaved.get(name.split(".")[-2]):
            values = to_interleaved(values, num_heads)
        theirs = names.get_name(name, (".weight",))
        if tensor.ndim == 1:
            writer.add_tensor(theirs, tensor.float().numpy())
        elif in_half:
            writer.add_tensor(theirs, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(theirs, values)


def convert(folder: Path, out: Path) -> None:
    """Raises ValueError for a model of another family."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(f"{folder} holds a {config['model_type']} model; only llama is converted")
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(folder.name)
    add_hyperparameters(writer, config)
    add_tokenizer(writer, folder, config["vocab_size"])
    add_tensors(writer, folder, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
