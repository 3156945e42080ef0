"""`speclen profile`: measure, look at, compare and hand on offline profiles."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cli.database import DATABASE, reading
from cli.errors import UserError
from cli.model_options import BACKEND, DEVICE, DRAFT, DTYPE, TARGET
from worker.spinning import set_spins

if TYPE_CHECKING:
    from cli.profile_document import ProfileDocument
    from controller.core import ContextKey
    from worker.models import ModelPair
    from worker.profiler import ProfileSettings

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="""Measure step times and survival offline; look at them, compare them and hand them on.

    Example: speclen profile run --quick
    """,
)

THREADS = typer.Option(0, min=0, help="CPU threads for the models; 0: as many as a worker takes.")
DB = typer.Option(DATABASE, "--db", metavar="FILE", help="Database of a controller, running or not.")
CONTROLLER = typer.Option("", help="Address of the controller to hand the profile to; default: the one that owns --db.")
PROFILE = typer.Argument("latest", help="Profile: a JSON file, the id of one in the database, or latest.")
JSON = typer.Option(False, "--json", help="Print as JSON.")

STARTED = time.monotonic()  # the verb is imported when it is used, so this is when the command began
QUICK_S = 25.0  # of the 30 that --quick promises: Python has started before, and the result is stored and shown after
FULL_BUDGET_S = 150.0


@app.command()
def run(
    target: str = TARGET,
    draft: str = DRAFT,
    device: str = DEVICE,
    dtype: str = DTYPE,
    backend: str = BACKEND,
    batch_sizes: str = typer.Option("1,2,4,8,16", help="Batch sizes: a list with ranges, such as 1,2,4-8."),
    lengths: str = typer.Option("0-8", help="Speculation lengths, likewise."),
    quick: bool = typer.Option(False, "--quick", help="A coarse grid in half a minute, loading included."),
    budget_s: float = typer.Option(
        0.0,
        min=0,
        help=f"Seconds of measuring at most; 0: {FULL_BUDGET_S:g}, or with --quick what is left of {QUICK_S:g}.",
    ),
    precision: float = typer.Option(
        0.03, min=0.001, max=1, help="A cell is done when its 95% interval is within this."
    ),
    temperature: float = typer.Option(0.0, min=0, max=100, help="Of the sampling that survival is measured under."),
    prompts: Path | None = typer.Option(None, help="File of prompts; default: held-out files of Python's library."),
    threads: int = THREADS,
    seed: int = typer.Option(0, min=0, help="Of prompts and order."),
    fresh: bool = typer.Option(False, "--fresh", help="Start anew instead of going on with an interrupted profile."),
    data_dir: Path = typer.Option(Path(".speclen"), help="Folder of unfinished and finished profiles."),
    db: Path = DB,
    controller: str = CONTROLLER,
    store: bool = typer.Option(True, help="Hand the profile to the controller that owns the database."),
    out: Path | None = typer.Option(None, help="JSON file of the profile; default: one in the data directory."),
    as_json: bool = JSON,
) -> None:
    """Measure whole-step times and survival over batch sizes and lengths on the real engine.

    Ctrl-C keeps what was measured; the same command goes on from there.

    Example: speclen profile run --target bundled:target-60m --batch-sizes 1,2,4,8,16 --lengths 0-8
    """
    set_spins()  # before torch is imported
    from cli.profile_document import write_document
    from cli.profile_import import import_profile
    from cli.profile_run import file_stem, measure, say
    from worker.profiler import ProfileSettings, quick_settings
    from worker.prompts import held_out_texts, texts_from_file

    sizes, wanted = ranges("--batch-sizes", batch_sizes, 1, 4096), ranges("--lengths", lengths, 0, 64)
    pair = load(target, draft, device, dtype, threads)
    if pair.draft is None:
        wanted = (0,)
    budget = budget_s or (max(3.0, QUICK_S - (time.monotonic() - STARTED)) if quick else FULL_BUDGET_S)
    settings = quick_settings(sizes[-1], wanted[-1], budget) if quick else ProfileSettings(sizes, wanted, budget)
    settings = adjusted(settings, precision, temperature, seed, backend)
    try:
        texts = texts_from_file(prompts) if prompts else held_out_texts()
        source = f"speclen profile run{' --quick' if quick else ''}"
        document = measure(pair, settings, texts, data_dir / "profiles", fresh, source)
    except ValueError as error:
        raise UserError(str(error)) from error
    path = out or data_dir / "profiles" / f"{file_stem(document.context)}.json"
    write_document(path, document.to_json())
    say(f"profile in {path}")
    if store:
        profile_id, place = import_profile(document.to_request(document.context, as_prior=False), db, controller)
        say(f"profile {profile_id} in {place}")
    present(document, as_json)


@app.command()
def show(profile: str = PROFILE, db: Path = DB, as_json: bool = JSON) -> None:
    """Show a profile: time per token, survival, and what the paper's model and our estimator make of it.

    Example: speclen profile show latest
    """
    present(find(profile, db), as_json)


@app.command()
def plot(
    profile: str = PROFILE,
    out: Path = typer.Option(Path("profile.png"), help="File to draw into: .png, .svg or .pdf."),
    db: Path = DB,
) -> None:
    """Draw a profile: time per token, survival, and step times with the fitted model.

    Example: speclen profile plot latest --out profile.svg
    """
    from cli.profile_analysis import analyse
    from cli.profile_plot import plot as draw

    document = find(profile, db)
    draw(document, analyse(document), out)
    print(out)


@app.command()
def export(
    profile: str = PROFILE,
    out: Path | None = typer.Option(None, help="File to write; default: print."),
    db: Path = DB,
) -> None:
    """Write a profile as JSON, for another machine to import or a worker to start from.

    Example: speclen profile export latest --out profile.json
    """
    from cli.profile_document import write_document

    content = find(profile, db).to_json()
    if out is None:
        print(json.dumps(content, indent=1))
    else:
        write_document(out, content)
        print(out)


@app.command(name="import")
def import_(
    profile: Path = typer.Argument(help="JSON file that `speclen profile run` or `export` wrote."),
    as_prior: bool = typer.Option(False, "--as-prior", help="Accept one of another context, as a starting point only."),
    target: str = TARGET,
    draft: str = DRAFT,
    device: str = DEVICE,
    dtype: str = DTYPE,
    backend: str = BACKEND,
    threads: int = THREADS,
    db: Path = DB,
    controller: str = CONTROLLER,
    as_json: bool = JSON,
) -> None:
    """Seed the context of this machine and these models with a profile.

    A profile of another model, device, dtype or engine is refused, unless --as-prior says that it is meant.

    Example: speclen profile import profile.json --target bundled:target-60m
    """
    from cli.profile_document import read_document
    from cli.profile_import import import_profile
    from cli.profile_run import core_context

    document = read_document(profile)
    here = core_context(load(target, draft, device, dtype, threads), backend)
    check_same_context(profile, document.context, here, as_prior)
    profile_id, place = import_profile(document.to_request(here, as_prior), db, controller)
    if as_json:
        print(json.dumps({"profile_id": profile_id, "num_cells": len(document.profile.cells), "context": asdict(here)}))
    else:
        print(f"profile {profile_id} in {place}{', as a prior' if as_prior else ''}")


@app.command()
def diff(
    first: str = typer.Argument(help="Profile: a JSON file, the id of one in the database, or latest."),
    second: str = typer.Argument(help="The one to compare it with."),
    db: Path = DB,
    as_json: bool = JSON,
) -> None:
    """Compare two profiles cell by cell.

    Example: speclen profile diff before.json latest
    """
    from cli.profile_show import differences, show_difference

    documents = (find(first, db), find(second, db))
    if not differences(*documents):
        raise UserError("the two profiles have no batch size and length in common")
    if as_json:
        print(json.dumps([vars(row) for row in differences(*documents)], indent=1))
    else:
        show_difference(*documents)


def ranges(flag: str, text: str, least: int, most: int) -> tuple[int, ...]:
    """Ascending numbers of a list such as 1,2,4-8. Raises UserError naming the flag."""
    values: set[int] = set()
    try:
        for part in text.split(","):
            low, _, high = part.partition("-")
            values |= set(range(int(low), int(high or low) + 1))
    except ValueError:
        raise UserError(f"{flag} {text!r} is not a list of whole numbers such as 1,2,4-8") from None
    if not values or min(values) < least or max(values) > most:
        raise UserError(f"{flag} {text!r} must lie between {least} and {most}")
    return tuple(sorted(values))


def load(target: str, draft: str, device: str, dtype: str, threads: int) -> ModelPair:
    """The pair, with torch set to the threads that a worker would take. Raises UserError."""
    from worker.models import load_pair
    from worker.threads import set_threads

    try:
        pair = load_pair(target, draft or None, device, dtype)
    except ValueError as error:
        raise UserError(str(error)) from error
    set_threads(threads, pair)
    return pair


def adjusted(
    settings: ProfileSettings, precision: float, temperature: float, seed: int, backend: str
) -> ProfileSettings:
    from dataclasses import replace

    return replace(settings, precision=precision, temperature=temperature, seed=seed, backend=backend)


def find(profile: str, db: Path) -> ProfileDocument:
    """A profile by file name, id or "latest". Raises UserError saying which there are."""
    from cli.profile_document import from_store, read_document
    from store.profiles import stored_profiles

    if profile != "latest" and not profile.isdecimal():
        return read_document(Path(profile))
    with reading(db) as connection:
        profiles = {stored.profile.profile_id: stored for stored in stored_profiles(connection)}
    if not profiles:
        raise UserError(f"{db} holds no profile: make one with `speclen profile run`")
    wanted = max(profiles) if profile == "latest" else int(profile)
    if wanted not in profiles:
        raise UserError(f"{db} holds no profile {wanted}; there are {', '.join(map(str, profiles))}")
    return from_store(profiles[wanted])


def check_same_context(path: Path, theirs: ContextKey, here: ContextKey, as_prior: bool) -> None:
    """Raises UserError naming every difference, unless they are accepted."""
    different = [
        f"{name} {getattr(theirs, name)!r} instead of {getattr(here, name)!r}"
        for name in ("target", "draft", "device", "dtype", "engine_fingerprint")
        if getattr(theirs, name) != getattr(here, name)
    ]
    if different and not as_prior:
        raise UserError(
            f"{path} was measured with {'; '.join(different)}: it does not describe this context; "
            "give --as-prior to use it as a starting point"
        )


def present(document: ProfileDocument, as_json: bool) -> None:
    from cli.profile_analysis import analyse, analysis_json
    from cli.profile_show import show as show_tables

    analysis = analyse(document)
    if as_json:
        print(json.dumps(analysis_json(document, analysis), indent=1))
    else:
        show_tables(document, analysis)
