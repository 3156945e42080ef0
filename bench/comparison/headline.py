"""Write the tables of docs/results/README.md from the results that are committed, and the figures beside it.

    python -m speclen.bench.comparison.headline [--check]

Each table stands between two markers, so that it never says anything but what the files say; each figure names the file
and the fingerprint of what it was drawn from. --check changes nothing and fails where page, figures and files disagree.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import typer

from speclen.bench.comparison.document import read_document
from speclen.bench.comparison.tables import SHOWN, tables
from speclen.bench.marked import begin_of, insert

ROOT = Path(__file__).resolve().parents[2]
FIGURES = (SHOWN, "time-varying", "copying")  # tracks that are drawn


def pages_of(folder: Path) -> list[Path]:
    """The page of results; and, where they are above it, the paper's and the project's README."""
    pages = (folder / "README.md", folder.parent / "paper.md", folder.parents[1] / "README.md")
    return [page for page in pages if page.exists()]


def updated(page: str, blocks: dict[str, str]) -> str:
    """The page with every block whose markers it has."""
    for name, block in blocks.items():
        if begin_of(name) in page:
            page = insert(page, name, block)
    return page


def figure_of(folder: Path, track: str) -> tuple[Path, str]:
    """Where the figure of a track is, and the words that it must hold: what it was drawn from."""
    content = (folder / "serve" / f"{track}.json").read_bytes()
    return folder / "serve" / f"{track}.svg", f"{track}.json {hashlib.sha256(content).hexdigest()[:16]}"


def draw_figures(folder: Path) -> None:
    from speclen.bench.comparison.plot import plot

    for track in FIGURES:
        if (folder / "serve" / f"{track}.json").exists():
            path, words = figure_of(folder, track)
            plot(read_document(folder / "serve" / f"{track}.json"), path)
            text = path.read_text("utf-8")
            path.write_text(text.replace("</svg>", f"<!-- drawn from {words} -->\n</svg>"), "utf-8")


def differences(folder: Path, pages: list[Path]) -> list[str]:
    """What disagrees with the files, in words; a table that stands nowhere, too."""
    texts = [page.read_text("utf-8") for page in pages]
    found = []
    for name, block in tables(folder).items():
        if all(updated(text, {name: block}) == text for text in texts) and any(
            begin_of(name) in text for text in texts
        ):
            continue
        found.append(f"the table {name}")
    for track in FIGURES:
        if not (folder / "serve" / f"{track}.json").exists():
            continue
        path, words = figure_of(folder, track)
        if not path.exists() or words not in path.read_text("utf-8"):
            found.append(f"the figure {path.name}")
    return found


def main(
    check: bool = typer.Option(False, help="Change nothing; fail when the page is not what the results say."),
    folder: Path = ROOT / "docs/results",
) -> None:
    """Update tables and figures of the page from the committed results."""
    pages = pages_of(folder)
    try:
        if check:
            if wrong := differences(folder, pages):
                print(
                    f"headline: {', '.join(wrong)} of {folder} is not what the files say: run python -m "
                    "speclen.bench.comparison.headline",
                    file=sys.stderr,
                )
                raise typer.Exit(1)
            return
        draw_figures(folder)
        blocks = tables(folder)
        for page in pages:
            page.write_text(updated(page.read_text("utf-8"), blocks), "utf-8")
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        print(f"headline: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    typer.run(main)
