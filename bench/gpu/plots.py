"""A picture of what `scripts/gpu_check` found."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(document: dict[str, Any], folder: Path) -> Path | None:
    """Throughput against length by batch size, and passes beside their floors; None where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for batch_size in document["sizes"]["batch_sizes"]:
        cells = [cell for cell in document["cells"] if cell["batch_size"] == batch_size]
        rates = [cell["tokens_per_s"] for cell in cells]
        lengths = [cell["speculation_length"] for cell in cells]
        (line,) = left.plot(lengths, rates, marker=".", label=f"batch size {batch_size}")
        best = max(range(len(rates)), key=rates.__getitem__)
        left.plot(lengths[best], rates[best], "*", color=line.get_color(), markersize=13)
    left.set(xlabel="speculation length (star: best)", ylabel="tokens per second", yscale="log")
    left.set_xticks(document["sizes"]["lengths"])
    left.legend(fontsize=8)
    names = [f"{one['model']}, b {one['batch_size']}, q {one['num_queries']}" for one in document["passes"]]
    places = range(len(names))
    for shift, key, label in (
        (-0.27, "floor_s", "floor"),
        (0, "seconds", "recorded"),
        (0.27, "plain_seconds", "plain"),
    ):
        right.barh(
            [place + shift for place in places], [1e3 * one[key] for one in document["passes"]], 0.27, label=label
        )
    right.set(yticks=list(places), yticklabels=names, xlabel="ms per pass", xscale="log")
    right.invert_yaxis()
    # Plain numbers, few of them: between two powers of ten the default writes labels over each other.
    for axis in (left.yaxis, right.xaxis):
        axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(ticker.NullFormatter())
    right.legend(fontsize=8)
    figure.suptitle(
        f"{document['sizes']['target']} with {document['sizes']['draft']} on {document['machine']['device']}"
    )
    path = folder / "gpu_check.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
