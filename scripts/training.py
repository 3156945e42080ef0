"""Parts that `train_pair.py` and `train_chat_draft.py` share: the training loop, outputs of an engine, a model's folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from speclen.worker.engine.engine import Engine
from speclen.worker.requests.request import GenerationRequest, SequenceOutput

REPORT_S = 60.0


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


def train(
    optimizers: Optimizers, seconds: float, loss_of: Callable[[], tuple[torch.Tensor, str]]
) -> Iterator[dict[str, int]]:
    """Train for this many seconds. Yields steps and seconds once a minute and at the end, so that the model can be saved.

    loss_of: the loss of the next batch, and a remark.
    """
    start, steps, told = time.monotonic(), 0, 0.0
    while (elapsed := time.monotonic() - start) < seconds:
        loss, remark = loss_of()
        loss.backward()
        optimizers.step(elapsed / seconds)
        steps += 1
        if elapsed - told > REPORT_S:
            told = elapsed
            print(f"{elapsed:6.0f} s  step {steps}  loss {loss.item():.3f}  {remark}", flush=True)
            yield {"steps": steps, "seconds": round(elapsed)}
    yield {"steps": steps, "seconds": round(seconds)}


def completed(
    engine: Engine, requests: Iterator[GenerationRequest], at_once: int, seconds: float
) -> Iterator[tuple[GenerationRequest, list[SequenceOutput]]]:
    """Run requests for this many seconds, at_once at a time; those that are running at the end are dropped."""
    under_way: dict[str, tuple[GenerationRequest, list[SequenceOutput]]] = {}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for request in islice(requests, at_once - len(under_way)):
            under_way[request.request_id] = request, []
            engine.submit(request, lambda output: under_way[output.request_id][1].append(output))
        engine.step()
        for name, (_, outputs) in list(under_way.items()):
            if outputs and outputs[-1].finish_reason is not None:
                yield under_way.pop(name)


def save(model: LlamaForCausalLM, tokenizer_folder: Path, folder: Path, facts: dict[str, object]) -> None:
    """A folder that any program can load: model, tokenizer, and the facts of its training."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(facts, flush=True)
