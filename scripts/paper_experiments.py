"""The paper's first two experiments and its open questions, on this machine; results go to docs/results.

    lengths        latency against length, from batch size 1 to the largest: the inverse relation
    architectures  the same for targets of other families with random weights: how step times grow, and what would be best
    threads        one pair on unlike devices: the same machine with one thread and with all
    quantised      int8 weights in the draft or in the target: does the best length move?
    redraw         an experiment's plot from its JSON

Each writes JSON and a plot; the JSON names the command, its commit and the machine. The third experiment, traffic that
varies, is `speclen bench serve`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from speclen.worker.backends.spinning import SPINS

os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # before torch is imported

import numpy as np
import torch
import typer
from paper_figure import plot_lengths
from transformers import AutoConfig, AutoModelForCausalLM

from speclen.cli.profile.analysis import analyse, analysis_json
from speclen.cli.profile.document import ProfileDocument, from_result, parse_document, write_document
from speclen.cli.profile.measuring import core_context
from speclen.cli.profile.plot import plot
from speclen.cli.profile.show import show
from speclen.cli.support.machine import machine, provenance
from speclen.worker.backends.threads import set_threads
from speclen.worker.models.loading import ModelPair, load_pair
from speclen.worker.profiling.profiler import Profiler
from speclen.worker.profiling.prompts import PromptSource, held_out_texts
from speclen.worker.profiling.samples import ProfileResult
from speclen.worker.profiling.settings import ProfileProgress, ProfileSettings

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)

NAME = "scripts/paper_experiments.py"
PROGRAM = f"python {NAME}"
OUT = typer.Option(Path("docs/results"), help="Folder of the results.")
BUDGET = typer.Option(120.0, help="Seconds of measuring per profile.")
TARGET = "bundled:target-60m"
DRAFT = "bundled:draft"
COMPARED_SIZES = (1, 4, 16)

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


def measure(pair: ModelPair, settings: ProfileSettings, title: str) -> ProfileResult:
    def report(progress: ProfileProgress) -> None:
        print(f"\r{title}: at most {progress.left_s:4.0f} s left", end="", file=sys.stderr, flush=True)

    source = PromptSource(pair.tokenizer, held_out_texts(), settings.seed)
    with Profiler(pair, settings, source, on_progress=report) as profiler:
        result = profiler.run().result()
    print(file=sys.stderr)
    if not result.survival:
        raise SystemExit(
            f"{title}: {settings.budget_s:g} s were too short to measure anything, give more with --budget-s"
        )
    return result


def document_of(pair: ModelPair, settings: ProfileSettings, title: str, **details: Any) -> ProfileDocument:
    facts = {
        "title": title,
        "machine": machine(pair.device),
        "settings": dataclasses.asdict(settings),
        **provenance(PROGRAM),
        **details,
    }
    return from_result(core_context(pair), measure(pair, settings, title), NAME, facts)


def publish(name: str, documents: dict[str, ProfileDocument], out: Path) -> None:
    """One JSON and one plot for the experiment, and a printed table per profile."""
    content = {}
    for title, document in documents.items():
        analysis = analyse(document)
        content[title] = analysis_json(document, analysis)
        show(document, analysis)
    write_document(out / f"{name}.json", content)
    draw(name, documents, out)


def draw(name: str, documents: dict[str, ProfileDocument], out: Path) -> None:
    if name == "lengths":
        plot_lengths({title: analyse(document) for title, document in documents.items()}, out / f"{name}.svg")
    elif len(documents) == 1:
        (document,) = documents.values()
        plot(document, analyse(document), out / f"{name}.svg")
    else:
        plot_comparison(documents, out / f"{name}.svg")


def plot_comparison(documents: dict[str, ProfileDocument], path: Path) -> None:
    """Time per token by length, as a share of length 0's, one panel per batch size and one line per profile."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(COMPARED_SIZES), figsize=(13, 4), layout="constrained", sharey=True)
    for axis, size in zip(axes, COMPARED_SIZES, strict=True):
        for title, document in documents.items():
            (batch,) = (batch for batch in analyse(document).batches if batch.batch_size == size)
            lengths, times = zip(*sorted(batch.ms_per_token.items()), strict=True)
            (line,) = axis.plot(lengths, np.array(times) / batch.ms_per_token[0], label=title)
            best = batch.best_length
            axis.plot(
                best, batch.ms_per_token[best] / batch.ms_per_token[0], "*", color=line.get_color(), markersize=12
            )
        axis.set(title=f"batch {size}", xlabel="speculation length")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("time per token / that of length 0")
    axes[-1].legend(fontsize=8)
    figure.savefig(path)
    plt.close(figure)


@app.command()
def redraw(name: str, out: Path = OUT) -> None:
    """Draw an experiment's plot from its JSON."""
    content = json.loads((out / f"{name}.json").read_text())
    draw(name, {title: parse_document(values) for title, values in content.items()}, out)


@app.command()
def lengths(
    target: str = TARGET,
    draft: str = DRAFT,
    batch_sizes: str = "1,2,4,8,16,32",
    max_length: int = 12,
    temperatures: str = "0,1",
    threads: int = 0,
    budget_s: float = BUDGET,
    out: Path = OUT,
) -> None:
    """Latency against length at every batch size, at each temperature."""
    pair = load_pair(target, draft)
    set_threads(threads, pair)
    sizes = tuple(int(size) for size in batch_sizes.split(","))
    documents = {}
    for temperature in map(float, temperatures.split(",")):
        settings = ProfileSettings(sizes, tuple(range(max_length + 1)), budget_s, temperature=temperature)
        title = f"temperature {temperature:g}"
        documents[title] = document_of(pair, settings, title)
    publish("lengths", documents, out)


@app.command()
def architectures(
    budget_s: float = BUDGET, out: Path = OUT, reference: Path = Path("docs/results/lengths.json")
) -> None:
    """Step times of other families; survival is that of the bundled pair, since random weights have none of their own."""
    borrowed = next(iter(json.loads(reference.read_text()).values()))
    survival, rows = tuple(borrowed["survival"]), tuple(borrowed["num_survival_rows"])
    documents = {}
    bundled = load_pair(TARGET, DRAFT)
    for name, (family, shape) in ARCHITECTURES.items():
        target = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).to(bundled.dtype).eval()
        pair = dataclasses.replace(bundled, target=target, target_name=f"random {name}")
        set_threads(0, pair)
        settings = ProfileSettings((1, 2, 4, 8, 16), tuple(range(9)), budget_s)
        document = document_of(pair, settings, name, num_parameters=target.num_parameters(), survival="borrowed")
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
        settings = ProfileSettings((1, 2, 4, 8, 16), tuple(range(9)), budget_s)
        title = f"{count} thread{'s' if count > 1 else ''}"
        documents[title] = document_of(pair, settings, title)
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
        settings = ProfileSettings((1, 2, 4, 8, 16), tuple(range(9)), budget_s, check_models=False)
        documents[f"{title} int8"] = document_of(pair, settings, f"int8: {title}")
    publish("quantised", documents, out)


def to_int8(model: Any) -> Any:
    """The model with int8 weights in every linear layer but the head, which is tied to the embedding."""
    linear = {
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    return torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), linear, dtype=torch.qint8).eval()


if __name__ == "__main__":
    app()
