"""Write a Llama-style GGUF as a checkpoint that transformers and speclen load: float32 weights, tokenizer, chat template.

PYTHONPATH=build/smollm2/packages python scripts/smollm2/convert.py FILE.gguf FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


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


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
