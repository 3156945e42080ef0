"""Tables in documents that are made by a program: each stands between two markers that name it."""

from __future__ import annotations

# Program that makes each table, as `python -m` takes it.
HEADLINE = "speclen.bench.comparison.headline"
MAKERS = {
    **dict.fromkeys(
        (
            "headline",
            "elsewhere",
            "aims",
            "policies",
            "closed",
            "survey",
            "paper",
            "gpu_lengths",
            "gpu_passes",
            "gpu_attention",
            "peers",
            "readme",
            "reporting",
            "figure",
            "figure_copying",
            "readme_figure",
        ),
        HEADLINE,
    ),
}


def begin_of(name: str) -> str:
    return f"<!-- {name}: made by python -m {MAKERS[name]} -->"


def end_of(name: str) -> str:
    return f"<!-- {name}: end -->"


def insert(page: str, name: str, block: str) -> str:
    """The page with the block between its markers. Raises ValueError when they are missing."""
    before, begin, rest = page.partition(begin_of(name))
    _, end, after = rest.partition(end_of(name))
    if not begin or not end:
        raise ValueError(f"the page lacks the markers {begin_of(name)} and {end_of(name)}")
    return f"{before}{begin}\n{block}\n{end}{after}"
