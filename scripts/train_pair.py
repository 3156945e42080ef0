"""Train the bundled pair on the Python standard library's source: `python scripts/train_pair.py`, in 80 minutes.

1. A tokenizer: byte-level BPE, 2,048 tokens.
2. The target: a Llama-style language model, next-token loss.
3. The target's own continuations of training text, which the draft learns from.
4. The draft, distilled from the target on those continuations and on training text.

A stage whose result lies in `--work` is not repeated. Files are split by a hash of their path, so the held-out files are
the same on every machine with the same Python. `scripts/measure_pair.py` measures the result.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from training import Optimizers, completed, save, train
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from speclen.records import PLAIN
from speclen.worker.arms import FixedArm
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.models.loading import load_pair
from speclen.worker.models.naming import BUNDLED_FOLDER
from speclen.worker.profiling.prompts import library_files
from speclen.worker.requests.request import GenerationRequest, SamplingParams

TARGET_S, CONTINUE_S, DRAFT_S = 2640, 420, 1620
END_OF_TEXT = "<|endoftext|>"
CONTEXT, MAX_POSITIONS = 512, 2048
TARGET_LAYERS, DRAFT_LAYERS = 6, 2
TARGET_BATCH, CONTINUED_BATCH, DRAFT_BATCH = 8, 160, 14
NUM_TEXT = 5  # of a draft's batch, from the training files themselves
PROMPT_LENGTHS, NEW_TOKENS = [32, 64, 64, 96, 128, 192], 128


def main(
    work: Path = typer.Option(Path("build/pair"), help="Folder for data and float32 checkpoints."),
    out: Path = typer.Option(BUNDLED_FOLDER, help="Where the package keeps the pair."),
    hurry: float = typer.Option(1.0, help="Divides all times: for a try."),
) -> None:
    """Train the pair, and put it into the package: bfloat16 weights, one tokenizer in each folder."""
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "tokenizer").exists():
        make_tokenizer(work / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    text, held_out = (token_stream(tokenizer, side) for side in (False, True))
    print(f"{len(text):,} tokens to train on, {len(held_out):,} held out")
    if not (work / "target").exists():
        train_target(work, text, held_out, TARGET_S / hurry)
    if not (work / "continuations.npz").exists():
        write_continuations(work, text, CONTINUE_S / hurry)
    if not (work / "draft").exists():
        train_draft(work, text, held_out, DRAFT_S / hurry)
    for name in ("target", "draft"):
        model = LlamaForCausalLM.from_pretrained(work / name).bfloat16()
        save(model, work / "tokenizer", out / name, json.loads((work / name / "training.json").read_text()))


def read_source(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        return None  # the test suite holds files in other encodings on purpose


def texts(held_out: bool) -> list[str]:
    return [text for path in library_files(held_out) if (text := read_source(path))]


def make_tokenizer(folder: Path) -> None:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator(texts(held_out=False), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    ).save_pretrained(folder)


def token_stream(tokenizer: PreTrainedTokenizerFast, held_out: bool) -> np.ndarray:
    """All files of one side of the split as one array of token ids, separated by the end-of-text token."""
    encoded = tokenizer(texts(held_out), add_special_tokens=False)["input_ids"]
    end = [tokenizer.eos_token_id]
    return np.fromiter(itertools.chain.from_iterable(ids + end for ids in encoded), dtype=np.uint16)


def llama(num_layers: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2048,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=None,
        )
    )


def windows(stream: np.ndarray, starts: np.ndarray) -> torch.Tensor:
    """Pieces of one token more than a context."""
    return torch.from_numpy(np.stack([stream[start : start + CONTEXT + 1] for start in starts]).astype(np.int64))


def draw_windows(stream: np.ndarray, count: int, rng: np.random.Generator) -> torch.Tensor:
    return windows(stream, rng.integers(0, len(stream) - CONTEXT - 1, size=count))


def next_token_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def measured(model: LlamaForCausalLM, held_out: np.ndarray) -> dict[str, float]:
    """Size, and mean next-token loss in nats over evenly spaced windows of the held-out files."""
    starts = np.linspace(0, len(held_out) - CONTEXT - 2, 48).astype(int)
    losses = [next_token_loss(model, windows(held_out, group)).item() for group in np.split(starts, 6)]
    return {"validation_loss": round(sum(losses) / len(losses), 4), "parameters": model.num_parameters()}


def train_target(work: Path, text: np.ndarray, held_out: np.ndarray, seconds: float) -> None:
    torch.manual_seed(0)
    rng, model = np.random.default_rng(0), llama(TARGET_LAYERS)

    def loss_of() -> tuple[torch.Tensor, str]:
        return next_token_loss(model, draw_windows(text, TARGET_BATCH, rng)), ""

    *_, facts = train(Optimizers(model, muon_lr=4e-3, adam_lr=4e-3), seconds, loss_of)
    sizes = {"tokens_per_step": TARGET_BATCH * CONTEXT, "train_tokens": len(text), "held_out_tokens": len(held_out)}
    save(model, work / "tokenizer", work / "target", facts | sizes | measured(model, held_out))


def write_continuations(work: Path, text: np.ndarray, seconds: float) -> None:
    """Let the target continue pieces of training text, as a draft will meet it when it serves.

    The file holds arrays [texts, prompt and continuation], by the length of the prompt.
    """
    config = EngineConfig(max_batch_size=CONTINUED_BATCH, max_speculation_length=0, prefill_chunk=1024)
    engine = Engine(load_pair(str(work / "target"), None, device="cpu", dtype="float32"), config, FixedArm(PLAIN))
    rows: dict[str, list[list[int]]] = defaultdict(list)
    for request, outputs in completed(engine, pieces(text), CONTINUED_BATCH * 5 // 4, seconds):
        tokens = [token for output in outputs for token in output.token_ids]
        rows[str(len(request.prompt_ids))].append([*request.prompt_ids, *tokens])
    if not rows:
        raise SystemExit(f"no continuation ended within {seconds:.0f} s: give a smaller --hurry")
    print(f"{sum(map(len, rows.values()))} continuations of {NEW_TOKENS} tokens")
    np.savez(work / "continuations.npz", **{length: np.array(mine, np.uint16) for length, mine in rows.items()})


def pieces(text: np.ndarray) -> Iterator[GenerationRequest]:
    """Requests without end, three of four greedy."""
    rng = np.random.default_rng(1)
    for number in itertools.count():
        length = int(rng.choice(PROMPT_LENGTHS))
        start = int(rng.integers(0, len(text) - length))
        temperature = 0.8 if number % 4 == 3 else 0.0
        sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=temperature)
        yield GenerationRequest(str(number), tuple(text[start : start + length].tolist()), sampling)


class DistillationBatches:
    """Batches of the target's continuations and of training text.

    rows: of `write_continuations`. Prompts of one length fill a batch without padding.
    """

    def __init__(self, text: np.ndarray, rows: list[np.ndarray]) -> None:
        self._text, self._rows, self._rng = text, rows, np.random.default_rng(2)
        self._shares = np.array([len(mine) for mine in rows]) / sum(map(len, rows))

    def draw(self) -> tuple[torch.Tensor, torch.Tensor, tuple[slice, slice]]:
        """Ids and their weights, both [batch, width], and where the target's own tokens are predicted."""
        rows = self._rows[self._rng.choice(len(self._rows), p=self._shares)]
        num_own, width = DRAFT_BATCH - NUM_TEXT, rows.shape[1]
        own = torch.from_numpy(rows[self._rng.integers(0, len(rows), size=num_own)].astype(np.int64))
        text = draw_windows(self._text, NUM_TEXT, self._rng)[:, :width]
        # Position i predicts token i + 1. Positions inside the prompt count too, but less than what the target wrote.
        written = (slice(num_own), slice(width - NEW_TOKENS - 1, None))
        weight = torch.full((DRAFT_BATCH, width), 0.3)
        weight[written] = weight[num_own:] = 1.0
        return torch.cat([own, text]), weight, written


def train_draft(work: Path, text: np.ndarray, held_out: np.ndarray, seconds: float) -> None:
    """Distil the draft, which starts from the target's embedding, head and first layers."""
    torch.manual_seed(2)
    batches = DistillationBatches(text, list(np.load(work / "continuations.npz").values()))
    teacher = LlamaForCausalLM.from_pretrained(work / "target").bfloat16().eval()
    model = llama(DRAFT_LAYERS)
    wanted = model.state_dict()
    model.load_state_dict({name: weight.float() for name, weight in teacher.state_dict().items() if name in wanted})

    def loss_of() -> tuple[torch.Tensor, str]:
        ids, weight, written = batches.draw()
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                teacher_logits = teacher(ids, use_cache=False).logits.float()
            logits = model(ids, use_cache=False).logits
        agree = (logits.argmax(-1) == teacher_logits.argmax(-1))[written].float().mean()
        return distillation_loss(logits, teacher_logits, weight), f"agreement {agree:.3f}"

    *_, facts = train(Optimizers(model, muon_lr=4e-3, adam_lr=2e-3), seconds, loss_of)
    save(model, work / "tokenizer", work / "draft", facts | measured(model, held_out))


def distillation_loss(logits: torch.Tensor, teacher_logits: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Weighted mean of the cross entropies with the teacher's distribution and with its most likely token.

    Greedy acceptance asks for the second, sampled acceptance for the first.
    """
    log_probs = logits.float().log_softmax(-1)
    soft = -(teacher_logits.softmax(-1) * log_probs).sum(-1)
    hard = -log_probs.gather(-1, teacher_logits.argmax(-1)[..., None]).squeeze(-1)
    return ((soft + hard) * weight).sum() / weight.sum()


if __name__ == "__main__":
    typer.run(main)
