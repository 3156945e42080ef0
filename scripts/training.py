"""Parts of `scripts/train_pair.py`: token streams, a model's shape, optimizers, batches, losses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from speclen.worker.profiling.prompts import library_files

END_OF_TEXT = "<|endoftext|>"
CONTEXT = 512
MAX_POSITIONS = 2048
NEW_TOKENS = 128
PADDING = 65_535


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


def first_layers(teacher: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """A float32 model of the teacher's embedding, head and first layers."""
    model = llama(layers, 256, 688, 4)
    wanted = model.state_dict()
    model.load_state_dict({name: weight.float() for name, weight in teacher.state_dict().items() if name in wanted})
    return model


class DistillationBatches:
    """Batches of the target's continuations and of training text.

    train: token stream. rows: as `submit_continuation` makes them. batch: sequences in each; text_share: of training text.
    """

    def __init__(self, train: np.ndarray, rows: np.ndarray, batch: int, text_share: float) -> None:
        self.rows = rows
        self._train = train
        self._rng = np.random.default_rng(2)
        # Continuations of prompts of one length fill a batch without padding.
        self._by_prompt = [rows[rows[:, 0] == length] for length in np.unique(rows[:, 0])]
        self._shares = np.array([len(group) for group in self._by_prompt]) / len(rows)
        self._num_text = round(batch * text_share)
        self._num_own = batch - self._num_text

    def draw(self) -> tuple[torch.Tensor, torch.Tensor, tuple[slice, slice]]:
        """Ids and their weights, both [batch, width], and where the target's own tokens are predicted."""
        group = self._by_prompt[self._rng.choice(len(self._by_prompt), p=self._shares)]
        prompt_length = int(group[0, 0])
        width = prompt_length + NEW_TOKENS
        own = group[self._rng.integers(0, len(group), size=self._num_own), 1 : 1 + width].astype(np.int64)
        text = sample_windows(self._train, self._num_text, self._rng)[:, :width]
        # Position i predicts token i + 1. Positions inside the prompt count too, but less than what the target wrote.
        written = (slice(self._num_own), slice(prompt_length - 1, None))
        weight = torch.full((self._num_own + self._num_text, width), 0.3)
        weight[written] = 1.0
        weight[self._num_own :] = 1.0
        return torch.cat([torch.from_numpy(own), text]), weight, written


def distillation_loss(logits: torch.Tensor, teacher_logits: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Weighted mean of the cross entropies with the teacher's distribution and with its most likely token.

    Greedy acceptance asks for the second, sampled acceptance for the first.
    """
    log_probs = logits.float().log_softmax(-1)
    soft = -(teacher_logits.softmax(-1) * log_probs).sum(-1)
    hard = -log_probs.gather(-1, teacher_logits.argmax(-1)[..., None]).squeeze(-1)
    return ((soft + hard) * weight).sum() / weight.sum()
