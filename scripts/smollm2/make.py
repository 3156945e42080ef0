"""Write a Llama-style GGUF as a checkpoint with a chat template, in float32, and check its tokenizer.

PYTHONPATH=build/smollm2/packages python scripts/smollm2/make.py FILE.gguf FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

TEXT = "In 1969, 2 people walked on the Moon;\n\tdef f(x):\n    return x + 1234.5  # naïve café 北京 🙂"


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
    """Raises ValueError for text that does not round-trip, or digits that share a token."""
    ids = tokenizer(TEXT)["input_ids"]
    if tokenizer.decode(ids) != TEXT:
        raise ValueError(f"{TEXT!r} comes back as {tokenizer.decode(ids)!r}")
    digits = [token for token in tokenizer.convert_ids_to_tokens(ids) if any(one.isdigit() for one in token)]
    if any(len(token) > 1 for token in digits):
        raise ValueError(f"digits share tokens: {digits}")
    return "tokenizer: the text round-trips, and each digit is a token of its own"


def main(gguf: Path, folder: Path) -> None:
    """Exits 1 with one sentence where the check fails."""
    convert(gguf, folder)
    try:
        print(check_tokenizer(AutoTokenizer.from_pretrained(folder)))
    except ValueError as error:
        raise SystemExit(f"real_model: {error}") from None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
