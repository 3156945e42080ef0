"""The paper's first two experiments and its open questions, on this machine; results go to docs/results.

    lengths        latency against length, from batch size 1 to the largest: the inverse relation
    architectures  the same for targets of other families with random weights: how step times grow, and what would be best
    threads        one pair on unlike devices: the same machine with one thread and with all
    quantised      int8 weights in the draft or in the target: does the best length move?

Each writes JSON and a plot; the JSON names the command, its commit and the machine. The third experiment, traffic that
varies, is `speclen bench serve`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from speclen.worker.backends.spinning import SPINS

os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # before torch is imported

import matplotlib
import torch
import typer
from matplotlib.figure import Figure
from transformers import AutoConfig, AutoModelForCausalLM

from speclen.cli.profile.analysis import BatchAnalysis, analyse, analysis_json
from speclen.cli.profile.document import ProfileDocument, write_document
from speclen.cli.profile.measuring import measure
from speclen.cli.profile.show import show
from speclen.cli.support.machine import provenance
from speclen.worker.backends.threads import set_threads
from speclen.worker.models.loading import ModelPair, load_pair
from speclen.worker.profiling.profiler import ProfileSettings
from speclen.worker.profiling.prompts import held_out_texts

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)

NAME = "scripts/paper_experiments.py"
OUT = typer.Option(Path("docs/results"), help="Folder of the results.")
BUDGET = typer.Option(120.0, help="Seconds of measuring per profile.")
TARGET, DRAFT = "bundled:target-60m", "bundled:draft"
SIZES, LENGTHS = (1, 2, 4, 8, 16), tuple(range(9))
COMPARED_SIZES = (1, 4, 16)
# The paper's figures, by batch size.
PAPER_LENGTHS = {1: 7, 2: 6, 4: 4, 8: 4, 16: 3, 32: 1}
PAPER_GAINS = {1: 2.73, 32: 1.31}
FLAT = 1.03  # lengths within so many times the best one's time per token are as good as it

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
    """One JSON and one plot for the experiment, and a printed table per profile."""
    analyses = {title: analyse(document) for title, document in documents.items()}
    for title, document in documents.items():
        show(document, analyses[title])
    content = {title: analysis_json(document, analyses[title]) for title, document in documents.items()}
    write_document(out / f"{name}.json", content)
    (plot_lengths if name == "lengths" else plot_comparison)(analyses, out / f"{name}.svg")


def figure(number: int, width: float, **options: Any) -> tuple[Figure, Any]:
    """A picture that is the same file for the same figures, and its panels."""
    matplotlib.rcParams["svg.hashsalt"] = "speclen"
    picture = Figure(figsize=(width, 4.5), layout="constrained")
    return picture, picture.subplots(1, number, **options)


def plot_comparison(analyses: dict[str, list[BatchAnalysis]], path: Path) -> None:
    """Time per token by length, as a share of length 0's, one panel per batch size and one line per profile."""
    picture, panels = figure(len(COMPARED_SIZES), 13, sharey=True)
    for panel, size in zip(panels, COMPARED_SIZES, strict=True):
        for title, analysis in analyses.items():
            (batch,) = (batch for batch in analysis if batch.batch_size == size)
            times = {length: ms / batch.ms_per_token[0] for length, ms in sorted(batch.ms_per_token.items())}
            (line,) = panel.plot(list(times), list(times.values()), label=title)
            panel.plot(batch.best_length, times[batch.best_length], "*", color=line.get_color(), markersize=12)
        panel.set(title=f"batch {size}", xlabel="speculation length", ylim=(0, None))
    panels[0].set_ylabel("time per token / that of length 0")
    panels[-1].legend(fontsize=8)
    picture.savefig(path, metadata={"Date": None})


def plot_lengths(analyses: dict[str, list[BatchAnalysis]], path: Path) -> None:
    """Left the best length by batch size, with the lengths that are as good; right the gain over length 0."""
    picture, (lengths, gains) = figure(2, 11)
    for title, analysis in analyses.items():
        sizes = [batch.batch_size for batch in analysis]
        good = [as_good(batch) for batch in analysis]
        (line,) = lengths.plot(sizes, [batch.best_length for batch in analysis], "o-", label=f"here, {title}")
        lengths.fill_between(sizes, [*map(min, good)], [*map(max, good)], color=line.get_color(), alpha=0.15)
        gains.plot(sizes, [batch.gain for batch in analysis], "o-", label=f"here, {title}")
    lengths.plot(list(PAPER_LENGTHS), list(PAPER_LENGTHS.values()), "ks--", label="paper")
    gains.plot(list(PAPER_GAINS), list(PAPER_GAINS.values()), "ks", label="paper")
    lengths.set(ylabel="best length (shaded: within 3% of it)", ylim=(-0.3, None))
    gains.set(ylabel="times the speed of length 0", ylim=(0, None))
    for panel in (lengths, gains):
        panel.set_xscale("log", base=2)
        panel.set_xlabel("batch size")
        panel.legend(fontsize=9)
    picture.savefig(path, metadata={"Date": None})


def as_good(batch: BatchAnalysis) -> list[int]:
    """Lengths whose time per token is about the best one's."""
    return [length for length, ms in batch.ms_per_token.items() if ms <= FLAT * batch.ms_per_token[batch.best_length]]


@app.command()
def lengths(budget_s: float = BUDGET, out: Path = OUT) -> None:
    """Latency against length at every batch size, greedy and at temperature 1."""
    pair = load_pair(TARGET, DRAFT)
    set_threads(0, pair)
    documents = {}
    for temperature in (0.0, 1.0):
        settings = ProfileSettings((*SIZES, 32), tuple(range(13)), budget_s, temperature=temperature)
        title = f"temperature {temperature:g}"
        documents[title] = measured(pair, settings, title)
    publish("lengths", documents, out)


@app.command()
def architectures(budget_s: float = BUDGET, out: Path = OUT) -> None:
    """Step times of other families; survival is that of `lengths`, since random weights have none of their own."""
    borrowed = next(iter(json.loads((out / "lengths.json").read_text()).values()))
    survival, rows = tuple(borrowed["survival"]), tuple(borrowed["num_survival_rows"])
    documents = {}
    bundled = load_pair(TARGET, DRAFT)
    for name, (family, shape) in ARCHITECTURES.items():
        target = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).to(bundled.dtype).eval()
        pair = dataclasses.replace(bundled, target=target, target_name=f"random {name}")
        set_threads(0, pair)
        settings = ProfileSettings(SIZES, LENGTHS, budget_s)
        document = measured(pair, settings, name, num_parameters=target.num_parameters(), survival="borrowed")
        profile = document.profile._replace(survival=survival[:8], num_survival_rows=rows[:8])
        documents[name] = dataclasses.replace(document, profile=profile)
    publish("architectures", documents, out)


@app.command()
def threads(budget_s: float = BUDGET, out: Path = OUT) -> None:
    """The same pair with one thread and with all of them: two devices of one fleet."""
    documents = {}
    for count in (1, os.cpu_count() or 1):
        pair = load_pair(TARGET, DRAFT)
        set_threads(count, pair)
        title = f"{count} thread{'s' if count > 1 else ''}"
        documents[title] = measured(pair, ProfileSettings(SIZES, LENGTHS, budget_s), title)
    publish("threads", documents, out)


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
        # engine would rightly refuse to call that exact.
        settings = ProfileSettings(SIZES, LENGTHS, budget_s, check_models=False)
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
