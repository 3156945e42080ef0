"""Train the bundled pair on the Python standard library's source.

Four stages, each of which may be run alone; every stage reads what the one before it wrote to `--work`:

    tokenizer   byte-level BPE, 2,048 tokens
    target      Llama-style language model, next-token loss
    continue    the target's own continuations of training text, which the draft learns from
    draft       distilled from the target on those continuations and on training text

Files are split by a hash of their path, so the held-out files are the same on every machine with the same Python.
`scripts/measure_pair.py` measures the result and writes the model card.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from training import (
    CONTEXT,
    END_OF_TEXT,
    MAX_POSITIONS,
    NEW_TOKENS,
    PADDING,
    DistillationBatches,
    Optimizers,
    distillation_loss,
    first_layers,
    llama,
    read_source,
    sample_windows,
    token_stream,
    validation_loss,
)
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from speclen.records import PLAIN
from speclen.worker.drafting.arm_chooser import FixedArm
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.models.loading import load_pair
from speclen.worker.profiling.prompts import library_files
from speclen.worker.requests.request import GenerationRequest, SamplingParams, SequenceOutput

PROMPT_LENGTHS = [32, 64, 64, 96, 128, 192]
ROW_WIDTH = 1 + max(PROMPT_LENGTHS) + NEW_TOKENS

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
WorkOption = typer.Option(Path("build/pair"), help="Folder for data, checkpoints and logs.")


def save(model: LlamaForCausalLM, folder: Path, facts: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


def load_streams(work: Path) -> tuple[np.ndarray, np.ndarray]:
    return np.load(work / "train.npy"), np.load(work / "held_out.npy")


@app.command()
def tokenizer(work: Path = WorkOption) -> None:
    """Train the tokenizer and turn both sides of the split into arrays of token ids."""
    work.mkdir(parents=True, exist_ok=True)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator((text for path in library_files(False) if (text := read_source(path))), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
    fast.save_pretrained(work / "tokenizer")
    for name, held_out in (("train", False), ("held_out", True)):
        stream = token_stream(fast, held_out)
        np.save(work / f"{name}.npy", stream)
        print(f"{name}: {len(library_files(held_out))} files, {len(stream):,} tokens")


@app.command()
def target(
    work: Path = WorkOption,
    seconds: int = typer.Option(2640, help="Training time in seconds."),
    batch: int = typer.Option(8, help="Windows of 512 tokens per step."),
    layers: int = 6,
) -> None:
    """Train the target with the next-token loss."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    train, held_out = load_streams(work)
    model = llama(layers, 256, 688, 4)
    optimizers = Optimizers(model, muon_lr=4e-3, adam_lr=4e-3)
    start, step, last_print = time.monotonic(), 0, 0.0
    while (elapsed := time.monotonic() - start) < seconds:
        ids = sample_windows(train, batch, rng)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizers.step(elapsed / seconds)
        step += 1
        if elapsed - last_print > 60 or step == 5:
            last_print = elapsed
            rate = step * batch * CONTEXT / (time.monotonic() - start)
            held = validation_loss(model, held_out)
            print(
                f"{elapsed:6.0f} s  step {step}  loss {loss.item():.3f}  held out {held:.3f}  {rate:.0f} tok/s",
                flush=True,
            )
    facts = {
        "seconds": seconds,
        "steps": step,
        "tokens_per_step": batch * CONTEXT,
        "train_tokens": len(train),
        "held_out_tokens": len(held_out),
        "validation_loss": round(validation_loss(model, held_out), 4),
        "parameters": model.num_parameters(),
    }
    save(model, work / "target", facts)
    print(facts)


@app.command(name="continue")
def continuations(
    work: Path = WorkOption,
    seconds: int = typer.Option(420, help="Generation time in seconds."),
    batch: int = 160,
    sampled_share: float = typer.Option(
        0.22, help="Share of the time for text sampled at temperature 0.8, at the end."
    ),
) -> None:
    """Let the target continue pieces of the training files: the text that a draft will meet when it serves."""
    rng = np.random.default_rng(1)
    train, _ = load_streams(work)
    target = LlamaForCausalLM.from_pretrained(work / "target")
    publish_folder(work / "tokenizer", target, work / "target-float32")
    pair = load_pair(str(work / "target-float32"), None, device="cpu", dtype="float32")
    config = EngineConfig(max_batch_size=batch, max_speculation_length=0, prefill_chunk=1024)
    engine = Engine(pair, config, FixedArm(PLAIN))
    rows: list[np.ndarray] = []
    start, submitted = time.monotonic(), 0
    while (elapsed := time.monotonic() - start) < seconds:
        while submitted - len(rows) < batch + batch // 4:
            temperature = 0.8 if elapsed > (1 - sampled_share) * seconds else 0.0
            submit_continuation(engine, submitted, train, rng, temperature, rows)
            submitted += 1
        engine.step()
    np.save(work / "continuations.npy", np.stack(rows))
    print(f"{len(rows)} continuations of {NEW_TOKENS} tokens")


def submit_continuation(
    engine: Engine, number: int, train: np.ndarray, rng: np.random.Generator, temperature: float, rows: list[np.ndarray]
) -> None:
    """Queue one piece of training text; when it is continued it joins `rows`.

    A row: length of the prompt, the prompt, its continuation, and PADDING up to ROW_WIDTH.
    """
    length = int(rng.choice(PROMPT_LENGTHS))
    start = int(rng.integers(0, len(train) - length))
    ids = [int(token) for token in train[start : start + length]]

    def on_output(output: SequenceOutput) -> None:
        ids.extend(output.token_ids)
        if output.finish_reason is not None:
            row = np.full(ROW_WIDTH, PADDING, dtype=np.uint16)
            row[0] = length
            row[1 : 1 + len(ids)] = ids
            rows.append(row)

    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=temperature)
    engine.submit(GenerationRequest(str(number), tuple(ids), sampling), on_output)


@app.command()
def draft(
    work: Path = WorkOption,
    seconds: int = typer.Option(1620, help="Training time in seconds."),
    layers: int = 2,
    name: str = "draft",
    batch: int = 14,
    text_share: float = typer.Option(0.35, help="Share of windows taken from the training files themselves."),
) -> None:
    """Distil the draft: follow the target's distribution, on the target's own text.

    The draft starts from the target's embedding, head and first layers, which it shares the shape of.
    """
    torch.manual_seed(2)
    train, held_out = load_streams(work)
    batches = DistillationBatches(train, np.load(work / "continuations.npy"), batch, text_share)
    teacher = LlamaForCausalLM.from_pretrained(work / "target").bfloat16().eval()
    model = first_layers(teacher, layers)
    optimizers = Optimizers(model, muon_lr=4e-3, adam_lr=2e-3)
    start, step, last_print, num_tokens = time.monotonic(), 0, 0.0, 0
    while (elapsed := time.monotonic() - start) < seconds:
        ids, weight, written = batches.draw()
        num_tokens += ids.numel()
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                teacher_logits = teacher(ids, use_cache=False).logits.float()
            logits = model(ids, use_cache=False).logits
        loss = distillation_loss(logits, teacher_logits, weight)
        loss.backward()
        optimizers.step(elapsed / seconds)
        step += 1
        if elapsed - last_print > 60 or step == 5:
            last_print = elapsed
            agree = (logits.argmax(-1) == teacher_logits.argmax(-1))[written].float().mean()
            show_progress(elapsed, step, loss.item(), f"agreement {agree:.3f}  {num_tokens / elapsed:.0f} tok/s")
    facts = {
        "seconds": seconds,
        "steps": step,
        "tokens_per_step": num_tokens // step,
        "continuation_tokens": len(batches.rows) * NEW_TOKENS,
        "validation_loss": round(validation_loss(model, held_out), 4),
        "parameters": model.num_parameters(),
    }
    save(model, work / name, facts)
    print(facts)


def show_progress(elapsed_s: float, step: int, loss: float, more: str) -> None:
    print(f"{elapsed_s:6.0f} s  step {step}  loss {loss:.3f}  {more}", flush=True)


@app.command()
def publish(
    work: Path = WorkOption,
    out: Path = typer.Option(Path("worker/bundled"), help="Where the package keeps the pair."),
    draft_name: str = "draft",
) -> None:
    """Copy the pair into the package: bfloat16 weights, one tokenizer in each folder."""
    for source, name in (("target", "target"), (draft_name, "draft")):
        model = LlamaForCausalLM.from_pretrained(work / source).bfloat16()
        publish_folder(work / "tokenizer", model, out / name)
        (out / name / "training.json").write_text((work / source / "training.json").read_text())
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    print(f"{out}: {size / 1e6:.1f} MB")


def publish_folder(tokenizer_folder: Path, model: LlamaForCausalLM, folder: Path) -> None:
    """A folder that any program can load: model and tokenizer."""
    model.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(tokenizer_folder).save_pretrained(folder)


if __name__ == "__main__":
    app()
