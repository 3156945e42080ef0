"""Train a draft for the chat model that `scripts/real_model` makes, on the model's own answers.

    python scripts/train_chat_draft.py answers --seconds 170     # again and again: every run adds to those before
    python scripts/train_chat_draft.py labels --seconds 170      # likewise, until all answers have labels
    python scripts/train_chat_draft.py draft --seconds 170       # likewise, until --budget is used up
    python scripts/train_chat_draft.py measure

    answers   the target's answers to prompts that are not held out, at temperatures 0, 0.7 and 1
    labels    the target's most likely tokens at every position of those
    draft     distilled from the labels
    measure   acceptance on held-out prompts, by position, kind and temperature

The draft is a narrow model with few layers. Its embedding is the target's, projected to the directions in which that
varies most: at the target's width, the vocabulary alone would cost a quarter of the target.
"""

from __future__ import annotations

import copy
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from measure_pair import CountingChooser, accepted_counts
from training import Optimizers
from transformers import AutoTokenizer, LlamaForCausalLM

from speclen.bench.serving.chat import KINDS, ChatPrompts
from speclen.records import PLAIN
from speclen.worker.drafting.arm_chooser import FixedArm
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.models.loading import load_pair
from speclen.worker.requests.request import GenerationRequest, SamplingParams, SequenceOutput

TEMPERATURES = (0.0, 0.7, 1.0)
NUM_LABELS = 16  # most likely tokens that are kept of every position
MAX_ANSWER = 256
ROWS = 32  # answered at a time
PROMPT_WEIGHT = 0.2  # of positions inside the prompt, against those of the answer

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
TargetOption = typer.Option(Path("build/smollm2/target"), help="Folder of the chat model.")
WorkOption = typer.Option(Path("build/smollm2/draft-work"), help="Folder for answers, labels and states.")
DraftOption = typer.Option(Path("build/smollm2/draft"), help="Folder of the draft.")
SecondsOption = typer.Option(170.0, help="Time of this run.")


@app.command()
def answers(target: Path = TargetOption, work: Path = WorkOption, seconds: float = SecondsOption) -> None:
    """Let the target answer prompts; no answer is begun that would not end in time."""
    work.mkdir(parents=True, exist_ok=True)
    pair = load_pair(str(target), None, device="cpu")
    prompts = ChatPrompts(pair.tokenizer)
    engine = Engine(pair, EngineConfig(ROWS, 0, max_context_length=1024), FixedArm(PLAIN))
    parts = sorted(work.glob("answers-*.npz"))
    first = sum(len(np.load(part)["lengths"]) for part in parts)
    rows: list[Row] = []
    number, started = first, time.monotonic()
    while (going_on := time.monotonic() - started < 0.9 * seconds) or not engine.scheduler.is_idle:
        while going_on and number - first - len(rows) < ROWS + 4:
            kind, temperature = KINDS[number % len(KINDS)], TEMPERATURES[number // len(KINDS) % len(TEMPERATURES)]
            submit(engine, number, prompts.draw(kind, number, held_out=False), temperature, rows)
            number += 1
        engine.step()
    np.savez(
        work / f"answers-{len(parts):03}.npz",
        ids=np.array([token for row in rows for token in row.ids], dtype=np.uint16),
        lengths=np.array([len(row.ids) for row in rows]),
        prompt_lengths=np.array([row.prompt_length for row in rows]),
    )
    num_tokens = sum(len(row.ids) - row.prompt_length for row in rows)
    print(f"{len(rows)} answers of {num_tokens:,} tokens in {time.monotonic() - started:.0f} s")


@dataclass(slots=True)
class Row:
    """A prompt and its answer. labels, weights [len(ids), NUM_LABELS]: the target's likeliest next tokens and theirs."""

    ids: list[int]
    prompt_length: int
    labels: np.ndarray | None = None
    weights: np.ndarray | None = None


def submit(engine: Engine, number: int, prompt: tuple[int, ...], temperature: float, rows: list[Row]) -> None:
    """Queue one prompt; with its answer it joins `rows`."""
    row = Row(list(prompt), len(prompt))

    def on_output(output: SequenceOutput) -> None:
        row.ids.extend(output.token_ids)
        if output.finish_reason is not None:
            rows.append(row)

    sampling = SamplingParams(max_tokens=MAX_ANSWER, temperature=temperature, seed=number)
    engine.submit(GenerationRequest(str(number), prompt, sampling), on_output)


def read_rows(part: Path) -> list[Row]:
    """Answers of one run, with their labels where there are any."""
    file = np.load(part)
    ends = np.cumsum(file["lengths"])
    found = [
        Row(file["ids"][end - length : end].tolist(), int(prompt_length))
        for end, length, prompt_length in zip(ends, file["lengths"], file["prompt_lengths"], strict=True)
    ]
    if (labels := labels_of(part)).exists():
        file = np.load(labels)
        for row, end in zip(found, ends, strict=True):
            place = slice(end - len(row.ids), end)
            row.labels, row.weights = file["labels"][place], file["weights"][place]
    return found


def labels_of(part: Path) -> Path:
    return part.with_name(part.name.replace("answers", "labels"))


@app.command()
@torch.inference_mode()
def labels(target: Path = TargetOption, work: Path = WorkOption, seconds: float = SecondsOption) -> None:
    """Ask the target for its likeliest tokens, of as many runs' answers as there is time for."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    started = time.monotonic()
    for part in sorted(work.glob("answers-*.npz")):
        if labels_of(part).exists() or time.monotonic() - started > seconds:
            continue
        kept = []
        for row in read_rows(part):
            logits = model(torch.tensor([row.ids]), use_cache=False).logits[0].float()
            best = logits.softmax(-1).topk(NUM_LABELS)
            kept.append((best.indices.numpy().astype(np.uint16), best.values.half().numpy()))
        ids, weights = (np.concatenate(one) for one in zip(*kept, strict=True))
        np.savez(labels_of(part), labels=ids, weights=weights)
        print(f"{labels_of(part)}: {len(ids):,} positions, {time.monotonic() - started:.0f} s", flush=True)


def narrow(teacher: LlamaForCausalLM, layers: int, width: int) -> LlamaForCausalLM:
    """The teacher's first layers and tied embedding, along the `width` directions in which the embedding is strongest.

    At the teacher's width that is the teacher cut short, but for the final norm. Weights of norms go into the products
    behind them, since a projection does not keep them apart.
    """
    config = copy.deepcopy(teacher.config)
    wide = config.hidden_size
    config.hidden_size, config.num_hidden_layers = width, layers
    model = LlamaForCausalLM(config)
    embedding = teacher.get_input_embeddings().weight.detach()
    directions = torch.linalg.eigh(embedding.T @ embedding).eigenvectors[:, -width:]
    scale = (wide / width) ** 0.5  # of a norm over fewer numbers of about the same energy
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(embedding @ directions)
        model.model.norm.weight.fill_(scale * float(teacher.model.norm.weight.mean()))
        for ours, theirs in zip(model.model.layers, teacher.model.layers, strict=False):
            for norm, part, names, last in (
                ("input_layernorm", "self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj"),
                ("post_attention_layernorm", "mlp", ("gate_proj", "up_proj"), "down_proj"),
            ):
                getattr(ours, norm).weight.fill_(scale)
                mine, other = getattr(ours, part), getattr(theirs, part)
                for name in names:
                    weight = getattr(other, name).weight * getattr(theirs, norm).weight
                    getattr(mine, name).weight.copy_(weight @ directions)
                getattr(mine, last).weight.copy_(directions.T @ getattr(other, last).weight)
    return model


class Batches:
    """Batches of rows of about equal length, in random order for ever. tokens: in each, padding included."""

    def __init__(self, rows: list[Row], tokens: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        rows = sorted(rows, key=lambda row: len(row.ids))
        self.batches: list[list[Row]] = [[]]
        for row in rows:
            if (len(self.batches[-1]) + 1) * len(row.ids) > tokens:
                self.batches.append([])
            self.batches[-1].append(row)

    def draw(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids [rows, width], labels and their weights [rows, width, NUM_LABELS], weights of positions [rows, width]."""
        rows = self.batches[self._rng.integers(len(self.batches))]
        width = max(len(row.ids) for row in rows)
        ids, place = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.float32)
        labels = np.zeros((len(rows), width, NUM_LABELS), np.int64)
        weights = np.zeros(labels.shape, np.float32)
        for at, row in enumerate(rows):
            assert row.labels is not None
            assert row.weights is not None
            length = len(row.ids)
            ids[at, :length], labels[at, :length], weights[at, :length] = row.ids, row.labels, row.weights
            place[at, : row.prompt_length - 1] = PROMPT_WEIGHT
            place[at, row.prompt_length - 1 : length - 1] = 1.0
        return torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(weights), torch.from_numpy(place)


def loss_of(
    model: LlamaForCausalLM, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, float]:
    """Mean cross entropy with the target's likeliest tokens and with its likeliest one, and agreement on the latter."""
    ids, labels, weights, place = batch
    wanted = place > 0
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(ids, use_cache=False).last_hidden_state[wanted]
        logits = model.lm_head(hidden)
    likely = logits.float().log_softmax(-1).gather(-1, labels[wanted])
    soft, hard = -(weights[wanted] * likely).sum(-1), -likely[:, 0]
    agree = (logits.argmax(-1) == labels[wanted][:, 0])[place[wanted] == 1.0].float().mean()
    return ((soft + hard) * place[wanted]).sum() / place.sum(), float(agree)


@app.command()
def draft(
    target: Path = TargetOption,
    work: Path = WorkOption,
    out: Path = DraftOption,
    seconds: float = SecondsOption,
    budget: float = typer.Option(1800.0, help="Time of all runs together, by which the learning rate goes."),
    layers: int = 3,
    width: int = typer.Option(288, help="A multiple of the number of the target's heads."),
    tokens: int = typer.Option(1500, help="Tokens of a batch."),
) -> None:
    """Distil the draft for a while, from where the last run ended."""
    torch.manual_seed(0)
    state_file = work / f"state-{layers}x{width}.pt"
    model = narrow(LlamaForCausalLM.from_pretrained(target), layers, width)
    optimizers = Optimizers(model, muon_lr=2e-3, adam_lr=1e-3)
    state: dict[str, Any] = {"seconds": 0.0, "steps": 0}
    if state_file.exists():
        state = torch.load(state_file)
        model.load_state_dict(state["model"])
        for optimizer, kept in zip(optimizers.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
    rows = [row for part in sorted(work.glob("answers-*.npz")) if labels_of(part).exists() for row in read_rows(part)]
    batches = Batches(rows, tokens, seed=state["steps"])
    before, started, steps = state["seconds"], time.monotonic(), 0
    while (elapsed := time.monotonic() - started) < min(seconds, budget - before):
        loss, agree = loss_of(model, batches.draw())
        loss.backward()
        optimizers.step((before + elapsed) / budget)
        steps += 1
        if steps % 20 == 1:
            print(
                f"{before + elapsed:6.0f} s  step {state['steps'] + steps}  loss {loss:.3f}  agreement {agree:.3f}",
                flush=True,
            )
    state = {
        "seconds": before + elapsed,
        "steps": state["steps"] + steps,
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers.optimizers],
    }
    torch.save(state, state_file)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(target).save_pretrained(out)
    facts = {name: state[name] for name in ("seconds", "steps")}
    facts |= {"parameters": model.num_parameters(), "answers": len(rows)}
    (out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(facts)


@app.command()
def measure(
    target: Path = TargetOption,
    draft: Path = DraftOption,
    num_prompts: int = typer.Option(50, help="Held-out prompts of every kind."),
    max_tokens: int = typer.Option(48, help="Of an answer."),
    kind: list[str] = typer.Option([*KINDS], help="Kinds of prompts."),
) -> None:
    """Acceptance by position, kind and temperature, as a Markdown table."""
    pair = load_pair(str(target), str(draft), device="cpu")
    prompts = ChatPrompts(pair.tokenizer)
    print("| kind | temperature | " + " | ".join(f"{at}" for at in range(1, 9)) + " | accepted |")
    print("|---" * 11 + "|")
    for one, temperature in itertools.product(kind, TEMPERATURES):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
        found = accepted_counts(pair, [prompts.draw(one, seed) for seed in range(num_prompts)], sampling)
        print(f"| {one} | {temperature:g} | {in_cells(found)} |", flush=True)


def in_cells(found: CountingChooser) -> str:
    """Survival by position, and tokens accepted a step on average."""
    return " | ".join(f"{share:.2f}" for share in found.survival()) + f" | {found.mean_accepted():.2f}"


if __name__ == "__main__":
    app()
