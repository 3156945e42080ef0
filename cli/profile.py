"""`speclen profile`: measure, show, plot, import and export offline profiles."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from speclen.cli.profile_import import check_same_context, find_destination, import_request, only_context
from speclen.cli.support.client import client_from
from speclen.cli.support.database import DB_OPTION, reading
from speclen.cli.support.flags import flags_from, ranges
from speclen.cli.support.output import UserError, check_place, say, user_errors, wrapped, write_whole
from speclen.controller.estimator import Estimator
from speclen.controller.wire.messages import read_profile
from speclen.process.credentials import ClientSecurity
from speclen.records import Limits
from speclen.store.queries import contexts, stored_profiles
from speclen.worker.backends import set_spins
from speclen.worker.config import WorkerConfig
from speclen.worker.models.naming import draft_of
from speclen.worker.profiling.file import ProfileDocument, read_document

if TYPE_CHECKING:  # modules that import torch are imported where they are used, after `set_spins`
    from speclen.worker.models.loading import ModelPair

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="""Measure step times and acceptance offline; show, import and export them.

    Example: speclen profile run --quick
    """,
)

THREADS = typer.Option(0, min=0, help="CPU threads for the models; 0: as many as a worker uses.")
CONTROLLER = typer.Option("", help="Address of the controller to import into; default: the one that owns --db.")
PROFILE = typer.Argument("latest", help="Profile: a JSON file, the id of one in the database, or latest.")
JSON = typer.Option(False, "--json", help="Print JSON.")
MODELS = ("target", "draft", "device", "dtype")

QUICK_S, FULL_S = 15.0, 150.0  # time to measure


@app.command()
@flags_from(WorkerConfig, *MODELS, "backend")
@flags_from(ClientSecurity)
def run(
    batch_sizes: str = typer.Option("1,2,4,8,16", help="Batch sizes: a list with ranges, such as 1,2,4-8."),
    lengths: str = typer.Option("0-8", help="Speculation lengths, such as 0,2,4-8."),
    quick: bool = typer.Option(False, "--quick", help="Measure fewer batch sizes and lengths."),
    budget_s: float = typer.Option(
        0.0, min=0, help=f"Seconds of measuring; 0: {FULL_S:g}, or {QUICK_S:g} with --quick."
    ),
    temperature: float = typer.Option(0.0, min=0, max=100, help="Temperature at which acceptance is measured."),
    prompts: Path | None = typer.Option(
        None, help="File of prompts, one JSON string per line; default: held-out files of Python's library."
    ),
    threads: int = THREADS,
    db: Path = DB_OPTION,
    controller: str = CONTROLLER,
    store: bool = typer.Option(True, help="Import the profile into the controller that owns the database."),
    out: Path | None = typer.Option(
        None, help="JSON file to write; default: a file in `profiles` next to the database."
    ),
    as_json: bool = JSON,
    **settings: Any,
) -> None:
    """Measure step times and acceptance by batch size and speculation length, on the real engine.

    Example: speclen profile run --target bundled:target-60m --batch-sizes 1,2,4,8,16 --lengths 0-8
    """
    if out is not None:
        check_place(out)
    sizes, wanted = ranges("--batch-sizes", batch_sizes, 1, 4096), ranges("--lengths", lengths, 0, 64)
    destination = find_destination(db, controller, client_from(settings)) if store else None
    set_spins()  # before `load` imports torch
    pair = load(threads, settings)
    from speclen.cli.profile_measure import file_stem, measure
    from speclen.worker.profiling.profiler import ProfileSettings, quick_settings
    from speclen.worker.profiling.prompts import held_out_texts, texts_from_file

    wanted = wanted if pair.draft is not None else (0,)
    if quick:
        plan = quick_settings(sizes[-1], wanted[-1], budget_s or QUICK_S)
    else:
        plan = ProfileSettings(sizes, wanted, budget_s or FULL_S)
    plan = replace(plan, temperature=temperature, backend=settings["backend"])
    with user_errors():
        texts = texts_from_file(prompts) if prompts else held_out_texts()
        document = measure(pair, plan, texts, f"speclen profile run{' --quick' * quick}")
    path = out or db.parent / "profiles" / f"{file_stem(document.context)}.json"
    write_whole(path, json.dumps(document.to_json(), indent=1))
    say(f"profile in {path}")
    if destination is not None:
        profile_id = destination.take(import_request(document.profile, document.context))
        say(f"profile {profile_id} in {destination}")
    present(document, as_json)


@app.command()
def show(profile: str = PROFILE, db: Path = DB_OPTION, as_json: bool = JSON) -> None:
    """Show a profile: time per token, the lengths that the estimator selects, and acceptance.

    Example: speclen profile show latest
    """
    present(find_profile(profile, db), as_json)


@app.command()
def plot(
    profile: str = PROFILE,
    out: Path = typer.Option(Path("profile.png"), help="Image file to write: .png, .svg or .pdf."),
    db: Path = DB_OPTION,
) -> None:
    """Plot a profile: time per token by length, with the best length of each batch size.

    Example: speclen profile plot latest --out profile.svg
    """
    draw(find_profile(profile, db), out)
    print(out)


@app.command()
def export(
    profile: str = PROFILE,
    out: Path | None = typer.Option(None, help="File to write; default: standard output."),
    db: Path = DB_OPTION,
) -> None:
    """Write a profile as JSON, for `speclen profile import` on another machine or a worker's --profile.

    Example: speclen profile export latest --out profile.json
    """
    text = json.dumps(find_profile(profile, db).to_json(), indent=1)
    if out is None:
        print(text)
    else:
        write_whole(out, text)
        print(out)


@app.command(name="import")
@flags_from(WorkerConfig, *MODELS, "backend")
@flags_from(ClientSecurity)
def import_(
    profile: Path = typer.Argument(help="JSON file that `speclen profile run` or `export` wrote."),
    as_prior: bool = typer.Option(False, "--as-prior", help="Accept a profile of another context as a starting point."),
    threads: int = THREADS,
    db: Path = DB_OPTION,
    controller: str = CONTROLLER,
    as_json: bool = JSON,
    **settings: Any,
) -> None:
    """Seed the context of this machine and these models with a profile.

    A profile of another model, device, dtype or engine is refused without --as-prior. The models are loaded to
    determine their context, except with --as-prior if the database has one context of models of these names.

    Example: speclen profile import profile.json --target bundled:target-60m
    """
    document = read_checked(profile)
    destination = find_destination(db, controller, client_from(settings))
    target, draft = settings["target"], draft_of(settings["target"], settings["draft"])
    here = only_context(destination.db, target, "" if draft == "none" else draft) if as_prior else None
    if here is None:
        from speclen.cli.profile_measure import core_context  # imports torch, which takes seconds

        here = core_context(load(threads, settings), settings["backend"])
    if not as_prior:
        check_same_context(profile, here)
    profile_id = destination.take(import_request(document.profile, here))
    if as_json:
        cells = len(document.profile.cells)
        print(json.dumps({"profile_id": profile_id, "num_cells": cells, "context": here._asdict()}))
    else:
        prior = f" as a prior of {here}" if as_prior else ""
        print(wrapped(f"profile {profile_id}{prior} in {destination}", sys.stdout))


def load(threads: int, settings: dict[str, Any]) -> ModelPair:
    """Load the models and set torch's threads to the number that a worker would use. Raises UserError."""
    from speclen.worker.backends.threads import set_threads
    from speclen.worker.models.loading import load_pair

    with user_errors():
        target, draft, device, dtype = (settings[name] for name in MODELS)
        pair = load_pair(target, draft_of(target, draft) or None, device, dtype)
    set_threads(threads, pair)
    return pair


def read_checked(path: Path) -> ProfileDocument:
    """The profile in a file, with the bounds of every number checked. Raises UserError."""
    with user_errors():
        document = read_document(path)
    try:
        read_profile(import_request(document.profile, document.context))
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} is not a profile of `speclen profile run`: {error}") from error
    return document


def find_profile(profile: str, db: Path) -> ProfileDocument:
    """A profile by file name, id or "latest". Raises UserError listing the known ids."""
    if profile != "latest" and not profile.isdecimal():
        return read_checked(Path(profile))
    with reading(db) as connection:
        profiles = {row.profile_id: row for row in stored_profiles(connection)}
        keys = {row.context_id: row.key for row in contexts(connection)}
    if not profiles:
        raise UserError(f"{db} holds no profile: make one with `speclen profile run`")
    wanted = max(profiles) if profile == "latest" else int(profile)
    if wanted not in profiles:
        raise UserError(f"{db} holds no profile {wanted}; there are {', '.join(map(str, profiles))}")
    row = profiles[wanted]
    imported_at = datetime.fromtimestamp(row.imported_at, UTC).isoformat(timespec="seconds")
    return ProfileDocument(keys[row.context_id], row.profile, imported_at)  # the database does not keep the details


@dataclass(frozen=True, slots=True)
class BatchAnalysis:
    """One batch size of a profile.

    ms_per_token: measured, by length. best_length: the length with the least. estimator_length: the length that the
    estimator selects if it knows only this profile. estimator_excess: how much slower that is than the best, as measured;
    None if it was not measured.
    """

    batch_size: int
    ms_per_token: dict[int, float]
    best_length: int
    estimator_length: int
    estimator_excess: float | None

    @property
    def gain(self) -> float | None:
        """Speed of the best length relative to length 0."""
        return self.ms_per_token[0] / self.ms_per_token[self.best_length] if 0 in self.ms_per_token else None


def analyse(document: ProfileDocument) -> list[BatchAnalysis]:
    """Measured times and the estimator's selection at every batch size, ascending."""
    profile = document.profile
    tokens = list(accumulate(profile.survival, initial=1.0))  # per sequence and step, by length, bonus included
    longest = max(max(cell.speculation_length for cell in profile.cells), len(profile.survival))
    estimator = Estimator(limits=Limits(max(cell.batch_size for cell in profile.cells), longest))
    estimator.seed(profile)
    found = []
    for size in sorted({cell.batch_size for cell in profile.cells}):
        cells = {cell.speculation_length: cell for cell in profile.cells if cell.batch_size == size}
        times = {length: 1e3 * cell.step_s / tokens[length] for length, cell in cells.items()}
        best, length = min(times, key=lambda length: times[length]), estimator.arm_for(size).speculation_length
        found.append(
            BatchAnalysis(size, times, best, length, times[length] / times[best] - 1 if length in times else None)
        )
    return found


def present(document: ProfileDocument, as_json: bool) -> None:
    """Print the profile with its analysis, as JSON or as a table."""
    analysis = analyse(document)
    if as_json:
        print(json.dumps(analysis_json(document, analysis), indent=1))
    else:
        show_tables(document, analysis)


def analysis_json(document: ProfileDocument, analysis: list[BatchAnalysis]) -> dict[str, Any]:
    """The profile with its analysis, as JSON."""
    best = [asdict(batch) | {"gain_over_length_0": batch.gain} for batch in analysis]
    return document.to_json() | {"best": best}


def title_of(document: ProfileDocument) -> str:
    """Models and machine in one line."""
    context = document.context
    return f"{context.target} with {context.draft}, {context.dtype} on {context.device}"


def show_tables(document: ProfileDocument, analysis: list[BatchAnalysis]) -> None:
    """Print time per token with the best length marked, the estimator's selection, and survival."""
    out, profile = Console(highlight=False, markup=False), document.profile
    out.print(title_of(document), style="bold")
    out.print(f"{document.context.engine_fingerprint}; {document.measured_at}; {profile.source}")
    out.print("\nms per token, by speculation length (down) and batch size (across); * is least")
    out.print(time_table(analysis))
    if not profile.survival:
        out.print("No survival was measured: only length 0 was run.")
        return
    shares = " ".join(f"{value:.3f}" for value in profile.survival)
    samples = ", ".join(f"{count:,}" for count in profile.num_survival_rows)
    tokens = f"{1.0 + sum(profile.survival):.2f} tokens a step at length {len(profile.survival)}"
    out.print(f"survival by position: {shares} (of {samples} sequences); {tokens}")


def time_table(analysis: list[BatchAnalysis]) -> Table:
    """One row per length, one column per batch size."""
    table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False)
    for heading in ("length", *(str(batch.batch_size) for batch in analysis)):
        table.add_column(heading, justify="right", no_wrap=True)
    for length in sorted({length for batch in analysis for length in batch.ms_per_token}):
        table.add_row(str(length), *(time_cell(batch, length) for batch in analysis))
    table.add_row("gain over 0", *("" if batch.gain is None else f"{batch.gain:.2f}x" for batch in analysis))
    selected = ((batch.estimator_length, batch.estimator_excess) for batch in analysis)
    table.add_row(
        "our estimator", *(f"{length} (+{excess:.0%})" if excess else f"{length}" for length, excess in selected)
    )
    return table


def time_cell(batch: BatchAnalysis, length: int) -> Text:
    """Time per token at a length; empty if it was not measured."""
    if (value := batch.ms_per_token.get(length)) is None:
        return Text("")
    best = length == batch.best_length
    return Text(f"{'*' if best else ''}{value:.3g}", style="bold green" if best else "")


def draw(document: ProfileDocument, out: Path) -> None:
    """Plot time per token by length. Raises UserError for a missing matplotlib, an unknown suffix or a failed write."""
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"{out} names no format for a plot: use .png, .svg or .pdf")
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plots need matplotlib: pip install 'speclen[plot]'") from error
    figure, analysis = Figure(figsize=(8, 5), layout="constrained"), analyse(document)
    axes = figure.subplots()
    for index, batch in enumerate(analysis):
        colour = colormaps["viridis"](0.9 * index / len(analysis))
        lengths = sorted(batch.ms_per_token)
        times = [batch.ms_per_token[length] for length in lengths]
        axes.plot(lengths, times, "o-", color=colour, markersize=3, label=f"batch {batch.batch_size}")
        axes.plot(
            batch.best_length, batch.ms_per_token[batch.best_length], "*", color="crimson", markersize=13, zorder=3
        )
    axes.set_title(f"{title_of(document)}; stars: best", fontsize=9)
    axes.set(xlabel="speculation length", ylabel="ms per token and sequence", ylim=(0, None))
    axes.legend(fontsize=8)
    try:
        figure.savefig(out, dpi=130)
    except OSError as error:
        raise UserError(f"cannot write {out} ({error.strerror}): choose another place") from error
