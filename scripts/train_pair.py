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
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from worker.engine import Engine, EngineConfig
from worker.length_chooser import FixedLength
from worker.models import load_pair
from worker.prompts import library_files
from worker.request import GenerationRequest, SamplingParams, SequenceOutput

END_OF_TEXT = "<|endoftext|>"
CONTEXT = 512
MAX_POSITIONS = 2048
PROMPT_LENGTHS = [32, 64, 64, 96, 128, 192]
NEW_TOKENS = 128
ROW_WIDTH = 1 + max(PROMPT_LENGTHS) + NEW_TOKENS
PADDING = 65_535

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
WorkOption = typer.Option(Path("build/pair"), help="Folder for data, checkpoints and logs.")


def read_source(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        return None  # the test suite holds files in other encodings on purpose


def token_stream(tokenizer: PreTrainedTokenizerFast, held_out: bool) -> np.ndarray:
    """All files of one side of the split as one array of uint16 token ids, separated by the end-of-text token."""
    texts = [text for path in library_files(held_out) if (text := read_source(path))]
    ids: list[int] = []
    for encoded in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        ids.extend(encoded)
        ids.append(tokenizer.eos_token_id)
    return np.array(ids, dtype=np.uint16)


def llama(num_layers: int, hidden: int, intermediate: int, num_heads: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2048,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=None,
        )
    )


class Optimizers:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms, one schedule for both.

    The schedule rises linearly for 2% of the time and falls linearly to zero over the last 60%. It follows the clock,
    because the budget of a run is given in seconds.
    """

    def __init__(self, model: LlamaForCausalLM, muon_lr: float, adam_lr: float) -> None:
        inner = [p for p in model.model.layers.parameters() if p.ndim == 2]
        known = {id(p) for p in inner}
        outer = [p for p in model.parameters() if id(p) not in known]
        self.optimizers = [
            torch.optim.Muon(inner, lr=muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(outer, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.base = [muon_lr, adam_lr]

    def step(self, progress: float) -> None:
        scale = min(progress / 0.02, 1.0, max(0.0, (1 - progress) / 0.6))
        for optimizer, base in zip(self.optimizers, self.base, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def sample_windows(stream: np.ndarray, count: int, rng: np.random.Generator) -> torch.Tensor:
    starts = rng.integers(0, len(stream) - CONTEXT - 1, size=count)
    return torch.from_numpy(np.stack([stream[s : s + CONTEXT + 1] for s in starts]).astype(np.int64))


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, stream: np.ndarray, num_windows: int = 48) -> float:
    """Mean next-token loss in nats over evenly spaced windows of the held-out files."""
    starts = np.linspace(0, len(stream) - CONTEXT - 2, num_windows).astype(int)
    losses = []
    for group in np.array_split(starts, num_windows // 8):
        ids = torch.from_numpy(np.stack([stream[s : s + CONTEXT + 1] for s in group]).astype(np.int64))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids[:, :-1], use_cache=False).logits
        losses.append(F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()).item())
    return sum(losses) / len(losses)


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
    config = EngineConfig(max_batch_size=batch, max_waiting=2 * batch, max_speculation_length=0, prefill_chunk=1024)
    engine = Engine(pair, config, FixedLength(0))
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
    The loss is the cross entropy with the target's distribution plus that with its most likely token: greedy
    acceptance asks for the second, sampled acceptance for the first.
    """
    torch.manual_seed(2)
    rng = np.random.default_rng(2)
    train, held_out = load_streams(work)
    rows = np.load(work / "continuations.npy")
    teacher = LlamaForCausalLM.from_pretrained(work / "target").bfloat16().eval()
    model = llama(layers, 256, 688, 4)
    teacher_state = teacher.float().state_dict()
    model.load_state_dict({k: v for k, v in teacher_state.items() if k in model.state_dict()})
    teacher.bfloat16()
    optimizers = Optimizers(model, muon_lr=4e-3, adam_lr=2e-3)
    start, step, last_print = time.monotonic(), 0, 0.0
    by_prompt = [rows[rows[:, 0] == length] for length in np.unique(rows[:, 0])]
    shares = np.array([len(group) for group in by_prompt]) / len(rows)
    num_text = round(batch * text_share)
    num_tokens = 0
    while (elapsed := time.monotonic() - start) < seconds:
        # Continuations of prompts of one length fill a batch without padding.
        group = by_prompt[rng.choice(len(by_prompt), p=shares)]
        prompt_length = int(group[0, 0])
        width = prompt_length + NEW_TOKENS
        own = group[rng.integers(0, len(group), size=batch - num_text), 1 : 1 + width].astype(np.int64)
        text = sample_windows(train, num_text, rng)[:, :width]
        ids = torch.cat([torch.from_numpy(own), text])
        num_tokens += ids.numel()
        # Position i predicts token i + 1. Positions inside the prompt count too, but less than what the target wrote.
        weight = torch.full((batch, width), 0.3)
        weight[: -num_text or None, prompt_length - 1 :] = 1.0
        weight[batch - num_text :] = 1.0
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            teacher_logits = teacher(ids, use_cache=False).logits
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids, use_cache=False).logits
        log_probs = logits.float().log_softmax(-1)
        teacher_logits = teacher_logits.float()
        soft = -(teacher_logits.softmax(-1) * log_probs).sum(-1)
        best = teacher_logits.argmax(-1)
        hard = -log_probs.gather(-1, best[..., None]).squeeze(-1)
        loss = ((soft + hard) * weight).sum() / weight.sum()
        loss.backward()
        optimizers.step(elapsed / seconds)
        step += 1
        if elapsed - last_print > 60 or step == 5:
            last_print = elapsed
            written = slice(prompt_length - 1, None)
            agree = (logits.argmax(-1) == best)[: batch - num_text, written].float().mean()
            rate = num_tokens / (time.monotonic() - start)
            print(
                f"{elapsed:6.0f} s  step {step}  loss {loss.item():.3f}  agreement {agree:.3f}  {rate:.0f} tok/s",
                flush=True,
            )
    facts = {
        "seconds": seconds,
        "steps": step,
        "tokens_per_step": num_tokens // step,
        "continuation_tokens": len(rows) * NEW_TOKENS,
        "validation_loss": round(validation_loss(model, held_out), 4),
        "parameters": model.num_parameters(),
    }
    save(model, work / name, facts)
    print(facts)


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
