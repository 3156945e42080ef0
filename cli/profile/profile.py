"""`speclen profile`: measure, look at and hand on offline profiles."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from speclen.cli.profile.analysis import analyse, analysis_json
from speclen.cli.profile.analysis import plot as draw
from speclen.cli.profile.analysis import show as show_tables
from speclen.cli.profile.document import ProfileDocument, find_profile, read_document, write_document
from speclen.cli.profile.importing import check_same_context, find_destination, only_context
from speclen.cli.support.client import client_from
from speclen.cli.support.database import DB_OPTION
from speclen.cli.support.errors import say, user_errors, wrapped
from speclen.cli.support.files import check_place
from speclen.cli.support.flags import flags_from, ranges
from speclen.transport.credentials import ClientSecurity
from speclen.worker.backends.spinning import set_spins
from speclen.worker.config import WorkerConfig
from speclen.worker.models.naming import draft_of

if TYPE_CHECKING:  # what imports torch is imported where it is used, after `set_spins`
    from speclen.worker.models.loading import ModelPair
    from speclen.worker.profiling.profiler import ProfileSettings

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="""Measure step times and acceptance offline; show, import and export them.

    Example: speclen profile run --quick
    """,
)

THREADS = typer.Option(0, min=0, help="CPU threads for the models; 0: as many as a worker uses.")
CONTROLLER = typer.Option("", help="Address of the controller that takes the profile; default: the one that owns --db.")
PROFILE = typer.Argument("latest", help="Profile: a JSON file, the id of one in the database, or latest.")
JSON = typer.Option(False, "--json", help="Print as JSON.")
MODELS = ("target", "draft", "device", "dtype")  # of `load`

QUICK_S, FULL_S = 15.0, 150.0  # of measuring


@app.command()
@flags_from(WorkerConfig, *MODELS, "backend")
@flags_from(ClientSecurity)
def run(
    batch_sizes: str = typer.Option("1,2,4,8,16", help="Batch sizes: a list with ranges, such as 1,2,4-8."),
    lengths: str = typer.Option("0-8", help="Speculation lengths, such as 0,2,4-8."),
    quick: bool = typer.Option(False, "--quick", help="A coarse grid."),
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
    store: bool = typer.Option(True, help="Give the profile to the controller that owns the database."),
    out: Path | None = typer.Option(None, help="JSON file to write; default: one in `profiles` beside the database."),
    as_json: bool = JSON,
    **settings: Any,
) -> None:
    """Measure step times and acceptance by batch size and length, on the real engine.

    Example: speclen profile run --target bundled:target-60m --batch-sizes 1,2,4,8,16 --lengths 0-8
    """
    if out is not None:
        check_place(out)
    sizes, wanted = ranges("--batch-sizes", batch_sizes, 1, 4096), ranges("--lengths", lengths, 0, 64)
    destination = find_destination(db, controller, client_from(settings)) if store else None
    set_spins()  # before torch is imported, by the next line
    pair = load(threads, settings)
    plan = plan_of(sizes, wanted if pair.draft is not None else (0,), quick, budget_s)
    plan = replace(plan, temperature=temperature, backend=settings["backend"])
    document = measured(pair, plan, prompts, f"speclen profile run{' --quick' * quick}", db.parent / "profiles", out)
    if destination is not None:
        profile_id = destination.take(document.to_request(document.context))
        say(f"profile {profile_id} in {destination}")
    present(document, as_json)


def measured(
    pair: ModelPair, plan: ProfileSettings, prompts: Path | None, source: str, folder: Path, out: Path | None
) -> ProfileDocument:
    """A new profile, kept in `out` or in the folder. Raises UserError."""
    from speclen.cli.profile.measuring import file_stem, measure
    from speclen.worker.profiling.prompts import held_out_texts, texts_from_file

    with user_errors():
        made = measure(pair, plan, texts_from_file(prompts) if prompts else held_out_texts(), source)
    path = out or folder / f"{file_stem(made.context)}.json"
    write_document(path, made.to_json())
    say(f"profile in {path}")
    return made


def plan_of(sizes: tuple[int, ...], lengths: tuple[int, ...], quick: bool, budget_s: float) -> ProfileSettings:
    """Settings and time of the measurement."""
    from speclen.worker.profiling.profiler import ProfileSettings, quick_settings

    if quick:
        return quick_settings(sizes[-1], lengths[-1], budget_s or QUICK_S)
    return ProfileSettings(sizes, lengths, budget_s or FULL_S)


@app.command()
def show(profile: str = PROFILE, db: Path = DB_OPTION, as_json: bool = JSON) -> None:
    """Show a profile: time per token, the lengths that the estimator selects, and acceptance.

    Example: speclen profile show latest
    """
    present(find_profile(profile, db), as_json)


@app.command()
def plot(
    profile: str = PROFILE,
    out: Path = typer.Option(Path("profile.png"), help="File to draw into: .png, .svg or .pdf."),
    db: Path = DB_OPTION,
) -> None:
    """Draw a profile: time per token by length, with the best length of each batch size.

    Example: speclen profile plot latest --out profile.svg
    """
    document = find_profile(profile, db)
    draw(document, analyse(document), out)
    print(out)


@app.command()
def export(
    profile: str = PROFILE,
    out: Path | None = typer.Option(None, help="File to write; default: print."),
    db: Path = DB_OPTION,
) -> None:
    """Write a profile as JSON, for another machine to import or a worker to start from.

    Example: speclen profile export latest --out profile.json
    """
    content = find_profile(profile, db).to_json()
    if out is None:
        print(json.dumps(content, indent=1))
    else:
        write_document(out, content)
        print(out)


@app.command(name="import")
@flags_from(WorkerConfig, *MODELS, "backend")
@flags_from(ClientSecurity)
def import_(
    profile: Path = typer.Argument(help="JSON file that `speclen profile run` or `export` wrote."),
    as_prior: bool = typer.Option(
        False,
        "--as-prior",
        help="Accept one of another context, as a starting point only.",
    ),
    threads: int = THREADS,
    db: Path = DB_OPTION,
    controller: str = CONTROLLER,
    as_json: bool = JSON,
    **settings: Any,
) -> None:
    """Seed the context of this machine and these models with a profile.

    A profile of another model, device, dtype or engine is refused, unless --as-prior is given. To find their
    context, models are loaded, except with --as-prior where the database has one context of models of these names.

    Example: speclen profile import profile.json --target bundled:target-60m
    """
    document = read_document(profile)
    destination = find_destination(db, controller, client_from(settings))
    target, draft = settings["target"], draft_of(settings["target"], settings["draft"])
    here = only_context(destination.db, target, "" if draft == "none" else draft) if as_prior else None
    if here is None:
        from speclen.cli.profile.measuring import core_context  # imports torch, which takes seconds

        here = core_context(load(threads, settings), settings["backend"])
    if not as_prior:
        check_same_context(profile, here)
    profile_id = destination.take(document.to_request(here))
    if as_json:
        cells = len(document.profile.cells)
        print(json.dumps({"profile_id": profile_id, "num_cells": cells, "context": here._asdict()}))
    else:
        prior = f" as a prior of {here}" if as_prior else ""
        print(wrapped(f"profile {profile_id}{prior} in {destination}", sys.stdout))


def load(threads: int, settings: dict[str, Any]) -> ModelPair:
    """The pair that settings name, with torch set to the threads that a worker would take. Raises UserError."""
    from speclen.worker.backends.threads import set_threads
    from speclen.worker.models.loading import load_pair

    with user_errors():
        target, draft, device, dtype = (settings[name] for name in MODELS)
        pair = load_pair(target, draft_of(target, draft) or None, device, dtype)
    set_threads(threads, pair)
    return pair


def present(document: ProfileDocument, as_json: bool) -> None:
    analysis = analyse(document)
    if as_json:
        print(json.dumps(analysis_json(document, analysis), indent=1))
    else:
        show_tables(document, analysis)
