"""Train a draft for the chat model that `scripts/real_model` makes, on the model's own answers.

    python scripts/train_chat_draft.py answers --seconds 1200    # again and again: every run adds to those before
    python scripts/train_chat_draft.py draft --seconds 1800
    python scripts/measure_pair.py build/smollm2/target build/smollm2/draft    # acceptance on held-out prompts

Prompts are those of bench/serving/chat.toml that are not held out, its six kinds in equal shares; a third of the answers is
greedy, a third at temperature 0.7, a third at 1. Every token of an answer comes with the target's likeliest tokens there.

The draft is a narrow model with few layers. Its embedding is the target's, projected to the directions in which that
varies most: at the target's width, the vocabulary alone would cost a quarter of the target.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import typer
from training import Optimizers, completed, save, train
from transformers import LlamaForCausalLM

from speclen.bench.serving.prompts import ChatPrompts
from speclen.bench.serving.traffic import CHAT_KINDS
from speclen.records import PLAIN
from speclen.worker.arms import FixedArm
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.models.loading import load_pair
from speclen.worker.requests.request import GenerationRequest, SamplingParams, SequenceOutput

TEMPERATURES = (0.0, 0.7, 1.0)
NUM_LABELS = 16  # likeliest tokens that are kept of every position
NUM_TRAINED = 8  # of them, that are learned
NUM_OTHERS = 1000  # tokens drawn for every batch from those that are not trained
MAX_ANSWER = 256
ROWS = 32  # answered at a time
ROWS_PER_FILE = 48


@dataclass(slots=True)
class Row:
    """A prompt and its answer. labels, log_probs: of every answer token, the target's likeliest tokens in its place."""

    ids: np.ndarray
    prompt_length: int
    labels: np.ndarray
    log_probs: np.ndarray


app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
TargetOption = typer.Option(Path("build/smollm2/target"), help="Folder of the chat model.")
WorkOption = typer.Option(Path("build/smollm2/draft-work"), help="Folder for answers and states.")
ThreadsOption = typer.Option(1, help="CPU threads.")


@app.command()
def answers(
    target: Path = TargetOption,
    work: Path = WorkOption,
    seconds: float = typer.Option(1200.0, help="Time of this run."),
    threads: int = ThreadsOption,
) -> None:
    """Let the target answer prompts. A file is written for every 48 answers, in the order in which they end."""
    torch.set_num_threads(threads)
    work.mkdir(parents=True, exist_ok=True)
    pair = load_pair(str(target), None, device="cpu")
    prompts = ChatPrompts(pair.tokenizer)
    engine = Engine(pair, EngineConfig(ROWS, 0, max_context_length=1024), FixedArm(PLAIN))
    num_files = len(list(work.glob("answers-*.npz")))
    requests = questions(prompts, num_files * (ROWS_PER_FILE + ROWS))  # those under way at the end of a run are dropped
    rows: list[Row] = []
    for request, outputs in completed(engine, requests, ROWS + 4, seconds):
        rows.append(row_of(request, outputs))
        if len(rows) == ROWS_PER_FILE:
            named = {f"{at} {field}": value for at, row in enumerate(rows) for field, value in asdict(row).items()}
            np.savez(work / f"answers-{num_files:03}.npz", **named)
            print(f"file {num_files}: {sum(len(row.labels) for row in rows):,} tokens", flush=True)
            num_files += 1
            rows.clear()


def questions(prompts: ChatPrompts, first: int) -> Iterator[GenerationRequest]:
    """Requests from that number on, without end."""
    for number in itertools.count(first):
        kind, temperature = (
            CHAT_KINDS[number % len(CHAT_KINDS)],
            TEMPERATURES[number // len(CHAT_KINDS) % len(TEMPERATURES)],
        )
        sampling = SamplingParams(max_tokens=MAX_ANSWER, temperature=temperature, seed=number, logprobs=NUM_LABELS)
        yield GenerationRequest(str(number), prompts.draw(kind, number, held_out=False), sampling)


def row_of(request: GenerationRequest, outputs: list[SequenceOutput]) -> Row:
    """A prompt with its whole answer."""
    tokens = [token for output in outputs for token in output.token_ids]
    likely = [one for output in outputs for one in output.logprobs]
    labels = np.array([one.top_ids for one in likely], np.uint16)
    log_probs = np.array([one.top_logprobs for one in likely], np.float16)
    return Row(np.array([*request.prompt_ids, *tokens], np.uint16), len(request.prompt_ids), labels, log_probs)


def read_rows(work: Path) -> Iterator[Row]:
    """Answers of all runs that have tokens."""
    for file in sorted(work.glob("answers-*.npz")):
        kept = np.load(file)
        for at in range(ROWS_PER_FILE):
            row = Row(*(kept[f"{at} {field.name}"] for field in fields(Row)))
            if len(row.labels):
                yield row


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


class Vocabulary:
    """The tokens of prompts and answers, and the likeliest: only their embeddings are trained, under numbers of their own.

    The others keep the target's projected embedding. In the loss, a few thousand drawn for every batch stand for all of
    them, which costs a fraction of all logits.
    """

    def __init__(self, rows: list[Row], size: int) -> None:
        seen = np.zeros(size, bool)
        for row in rows:
            seen[row.ids] = True
            seen[row.labels[:, 0]] = True
        self.used = torch.from_numpy(np.flatnonzero(seen))
        self._numbers = np.where(seen, np.cumsum(seen) - 1, -1)
        self._others = torch.from_numpy(np.flatnonzero(~seen))

    def number(self, ids: np.ndarray) -> np.ndarray:
        """Numbers of tokens; -1 for the others."""
        return self._numbers[ids]

    def take_used(self, model: LlamaForCausalLM) -> torch.Tensor:
        """Cut the model down to the used tokens. Returns the embeddings of the others."""
        full = model.get_input_embeddings().weight.detach()
        model.resize_token_embeddings(len(self.used), mean_resizing=False)
        model.get_input_embeddings().weight.data.copy_(full[self.used])
        return full[self._others]

    def put_back(self, model: LlamaForCausalLM, full: LlamaForCausalLM) -> None:
        """Copy a trained model into one of the whole vocabulary."""
        weights = model.state_dict()
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            table = full.state_dict()[name].clone()
            table[self.used] = weights[name]
            weights[name] = table
        full.load_state_dict(weights)


@dataclass(slots=True)
class Batch:
    """ids: [rows, width]. place: [positions], of those whose next token is the target's own, in ids flattened.

    labels, weights: [positions, NUM_TRAINED], the target's likeliest next tokens and their shares.
    """

    ids: torch.Tensor
    place: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


class Batches:
    """Batches of rows of about equal length, in random order without end. tokens: in each batch, padding included."""

    def __init__(self, rows: list[Row], vocabulary: Vocabulary, tokens: int, seed: int) -> None:
        self._rng, self._vocabulary = np.random.default_rng(seed), vocabulary
        self._rows = sorted(rows, key=lambda row: len(row.ids))
        self._tokens = tokens

    def draw(self) -> Batch:
        """A batch of neighbours in length, from a random place on."""
        first = int(self._rng.integers(len(self._rows)))
        count = max(1, self._tokens // (len(self._rows[first].ids) + 8))
        rows = self._rows[first : first + count]
        width = max(len(row.ids) for row in rows)
        ids = np.zeros((len(rows), width), np.int64)
        for at, row in enumerate(rows):
            ids[at, : len(row.ids)] = self._vocabulary.number(row.ids)
        starts = [at * width + row.prompt_length - 1 for at, row in enumerate(rows)]
        place = [np.arange(len(row.labels)) + start for row, start in zip(rows, starts, strict=True)]
        labels = self._vocabulary.number(np.concatenate([row.labels[:, :NUM_TRAINED] for row in rows]))
        shares = np.exp(np.concatenate([row.log_probs[:, :NUM_TRAINED] for row in rows]).astype(np.float32))
        shares[labels < 0] = 0.0
        return Batch(*(torch.from_numpy(one) for one in (ids, np.concatenate(place), labels.clip(0), shares)))


def loss_of(model: LlamaForCausalLM, batch: Batch, others: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Mean cross entropy with the target's likeliest tokens and with its likeliest one, and agreement on the latter."""
    drawn = others[torch.randint(len(others), (NUM_OTHERS,))]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(batch.ids, use_cache=False).last_hidden_state.flatten(0, 1)[batch.place]
        logits = model.lm_head(hidden).float()
        other_logits = (hidden @ drawn.T).float() + np.log(len(others) / NUM_OTHERS)
    norm = torch.logaddexp(logits.logsumexp(-1), other_logits.logsumexp(-1))
    likely = logits.gather(-1, batch.labels) - norm[:, None]
    agree = (logits.detach().argmax(-1) == batch.labels[:, 0]).float().mean()
    return (-(batch.weights * likely).sum(-1) - likely[:, 0]).mean(), f"agreement {agree:.3f}"


@app.command()
def draft(
    target: Path = TargetOption,
    work: Path = WorkOption,
    out: Path = typer.Option(Path("build/smollm2/draft"), help="Folder of the draft."),
    seconds: float = typer.Option(1800.0, help="Time of this run; the learning rate ends with it."),
    layers: int = 3,
    width: int = typer.Option(216, help="A multiple of the number of the target's heads."),
    tokens: int = typer.Option(2000, help="Tokens of a batch."),
    threads: int = ThreadsOption,
) -> None:
    """Distil the draft. It is written every minute and at the end; nothing else is kept."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    rows = list(read_rows(work))
    full = narrow(LlamaForCausalLM.from_pretrained(target, dtype=torch.float32), layers, width)
    vocabulary = Vocabulary(rows, full.config.vocab_size)
    model = copy.deepcopy(full)
    others = vocabulary.take_used(model)
    optimizers = Optimizers(model, muon_lr=2e-3, adam_lr=1e-3)
    batches = Batches(rows, vocabulary, tokens, seed=0)
    facts = {"layers": layers, "width": width, "parameters": full.num_parameters(), "answers": len(rows)}
    facts |= {"tokens": sum(len(row.labels) for row in rows), "used_tokens": len(vocabulary.used)}
    for so_far in train(optimizers, seconds, lambda: loss_of(model, batches.draw(), others)):
        vocabulary.put_back(model, full)
        save(copy.deepcopy(full).bfloat16(), target, out, facts | so_far)


if __name__ == "__main__":
    app()
