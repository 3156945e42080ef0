"""Write a Llama-style checkpoint with a byte-level BPE tokenizer as GGUF, so that llama.cpp serves the same weights.

Needs the packages gguf and numpy only; runs in the environment of the peer. Norms become float32 as llama.cpp expects;
the other weights keep their dtype unless --dtype says otherwise: its CPU kernels differ a lot in speed by dtype.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# Names inside a layer, ours to llama.cpp's.
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """ "model.layers.3.mlp.up_proj.weight" is "blk.3.ffn_up.weight". Raises KeyError for a tensor of another family."""
    stem, _, kind = name.rpartition(".")
    if stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.{kind}"
    _, _, number, rest = stem.split(".", 3)
    return f"blk.{number}.{LAYER_NAMES[rest]}.{kind}"


def to_interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of llama.cpp's rotary embedding.

    Transformers rotates the first half of a head against the second, llama.cpp neighbouring pairs. weight: [out, in].
    """
    head_dim = weight.shape[0] // num_heads
    halves = weight.reshape(num_heads, 2, head_dim // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """bfloat16 comes as uint16, since numpy has no such type."""
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        header_size = int.from_bytes(file.read_bytes()[:8], "little")
        header = json.loads(file.read_bytes()[8 : 8 + header_size])
        data = np.memmap(file, dtype=np.uint8, mode="r", offset=8 + header_size)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            dtype = {"BF16": np.uint16, "F32": np.float32, "F16": np.float16}[entry["dtype"]]
            tensors[name] = np.array(data[begin:end]).view(dtype).reshape(entry["shape"])
    return tensors


def to_float32(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def add_hyperparameters(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int, eos_id: int) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocab, special = tokenizer["model"]["vocab"], {token["id"] for token in tokenizer["added_tokens"]}
    by_id = {index: token for token, index in vocab.items()}
    tokens = [by_id.get(index, f"<unused{index}>") for index in range(vocab_size)]
    kinds = [
        gguf.TokenType.CONTROL
        if index in special
        else (gguf.TokenType.NORMAL if index in by_id else gguf.TokenType.UNUSED)
        for index in range(vocab_size)
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("starcoder")  # byte-level BPE with single digits
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(eos_id)
    writer.add_bos_token_id(eos_id)
    writer.add_add_bos_token(False)


def add_tensors(
    writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray], config: dict[str, Any], dtype: str | None
) -> None:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    for name, values in tensors.items():
        if name.endswith("q_proj.weight"):
            values = to_interleaved(values, heads)
        elif name.endswith("k_proj.weight"):
            values = to_interleaved(values, kv_heads)
        if values.ndim == 1 or dtype == "float32":
            writer.add_tensor(gguf_name(name), to_float32(values))
        elif dtype == "float16":
            writer.add_tensor(gguf_name(name), to_float32(values).astype(np.float16))
        elif values.dtype == np.uint16:
            # The writer wants raw bytes for a type that numpy lacks.
            raw = values.view(np.uint8)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(gguf_name(name), values)


def convert(folder: Path, out: Path, dtype: str | None) -> None:
    """Raises SystemExit naming what is not of the expected family."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config["model_type"] != "llama":
        raise SystemExit(f"{folder} holds a {config['model_type']} model; only llama is converted")
    eos = config["eos_token_id"]
    tensors = read_tensors(folder)
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(folder.name)
    add_hyperparameters(writer, config)
    add_tokenizer(writer, folder, config["vocab_size"], eos[0] if isinstance(eos, list) else eos)
    add_tensors(writer, tensors, config, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("float32", "float16"), help="default: as in the checkpoint")
    arguments = parser.parse_args()
    convert(arguments.folder, arguments.out, arguments.dtype)
