"""Experiments of docs/explanation/paper.md that `speclen profile run` cannot make; results go to docs/results.

    architectures  targets of other families with random weights: how step times grow, and what would be best
    quantised      int8 weights in the draft or in the target: does the best length move?

Each writes JSON, which names the command, its commit and the machine.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from speclen.worker.backends import SPINS

os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # before torch is imported

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM

from speclen.cli.profile import analyse, analysis_json, show_tables
from speclen.cli.profile_measure import measure
from speclen.cli.support.machine import provenance
from speclen.cli.support.output import write_whole
from speclen.worker.backends.threads import set_threads
from speclen.worker.models.loading import ModelPair, load_pair
from speclen.worker.profiling.file import ProfileDocument, read_document
from speclen.worker.profiling.profiler import ProfileSettings
from speclen.worker.profiling.prompts import held_out_texts

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)

NAME = "scripts/paper_experiments.py"
RESULTS = Path("docs/results")
OUT = typer.Option(RESULTS, help="Folder of the results.")
BUDGET = typer.Option(120.0, help="Seconds of measuring per profile.")
TARGET, DRAFT = "bundled:target-60m", "bundled:draft"
SIZES, LENGTHS = (1, 2, 4, 8, 16), tuple(range(9))

# Shapes of about 60 million parameters over the bundled vocabulary, so that families differ and sizes do not.
COMMON = {"vocab_size": 2048, "max_position_embeddings": 2048, "num_hidden_layers": 8, "hidden_size": 768}
HEADS = {"num_attention_heads": 12}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("opt", {**COMMON, **HEADS, "ffn_dim": 3072, "word_embed_proj_dim": 768}),
    "gpt2": ("gpt2", {"vocab_size": 2048, "n_positions": 2048, "n_layer": 8, "n_embd": 768, "n_head": 12}),
    "gpt_neox": ("gpt_neox", {**COMMON, **HEADS, "intermediate_size": 3072}),
    "qwen3 (grouped queries)": (
        "qwen3",
        {**COMMON, **HEADS, "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 2304},
    ),
}

Documents = dict[str, ProfileDocument]


def measured(pair: ModelPair, settings: ProfileSettings, title: str, **details: Any) -> ProfileDocument:
    """A profile of the pair. Raises UserError when the time was too short for one."""
    document = measure(pair, settings, held_out_texts(), NAME)
    facts = {"title": title, **provenance(f"python {NAME}"), **details}
    return dataclasses.replace(document, details=document.details | facts)


def publish(name: str, documents: Documents, out: Path) -> None:
    """One JSON for the experiment, and a printed table per profile."""
    analyses = {title: analyse(document) for title, document in documents.items()}
    for title, document in documents.items():
        show_tables(document, analyses[title])
    content = {title: analysis_json(each, analyses[title]) for title, each in documents.items()}
    write_whole(out / f"{name}.json", json.dumps(content, indent=1))


@app.command()
def architectures(budget_s: float = BUDGET, out: Path = OUT) -> None:
    """Step times of other families; survival is the bundled pair's, since random weights have none of their own."""
    borrowed = read_document(RESULTS / "lengths-greedy.json").profile
    documents = {}
    bundled = load_pair(TARGET, DRAFT)
    for name, (family, shape) in ARCHITECTURES.items():
        target = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).to(bundled.dtype).eval()
        pair = dataclasses.replace(bundled, target=target, target_name=f"random {name}")
        set_threads(0, pair)
        settings = ProfileSettings(SIZES, LENGTHS, budget_s)
        document = measured(pair, settings, name, num_parameters=target.num_parameters(), survival="borrowed")
        profile = document.profile._replace(
            survival=borrowed.survival[:8], num_survival_rows=borrowed.num_survival_rows[:8]
        )
        documents[name] = dataclasses.replace(document, profile=profile)
    publish("architectures", documents, out)


@app.command()
def quantised(budget_s: float = BUDGET, out: Path = OUT) -> None:
    """Float32 against int8 weights (dynamic quantisation) in the draft, in the target, and in both."""
    documents = {}
    for title, which in (("none", ()), ("draft", ("draft",)), ("target", ("target",)), ("both", ("draft", "target"))):
        pair = load_pair(TARGET, DRAFT, "cpu", "float32")
        set_threads(0, pair)
        for model in which:
            setattr(pair, model, to_int8(getattr(pair, model)))
        # Activations are scaled by the largest of the whole batch, so outputs depend on who shares the batch, and the
        # engine would rightly refuse to call that exact. OpenVINO runs float32 alone: torch runs all four.
        settings = ProfileSettings(SIZES, LENGTHS, budget_s, backend="torch", check_models=False)
        documents[f"{title} int8"] = measured(pair, settings, f"int8: {title}")
    publish("quantised", documents, out)


def to_int8(model: Any) -> Any:
    """The model with int8 weights in every linear layer but the head, which is tied to the embedding."""
    linear = {
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    return torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), linear, dtype=torch.qint8).eval()


if __name__ == "__main__":
    app()
