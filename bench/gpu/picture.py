"""Tokens per second by policy and number of requests, as tables and as a picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Rates = dict[str, dict[str, float]]  # by policy, by requests at once


def own_rates(document: dict[str, Any]) -> Rates:
    """Tokens per second over all blocks of a comparison with closed loops."""
    sums: dict[tuple[str, int], tuple[float, float]] = {}
    for row in document["rounds"]:
        requests = document["at_once"][row["number"] % len(document["at_once"])]
        for policy, block in row["blocks"].items():
            tokens, seconds = sums.get((policy, requests), (0.0, 0.0))
            sums[policy, requests] = tokens + block["num_tokens"], seconds + block["seconds"]
    rates: Rates = {policy: {} for policy in document["policies"]}
    for (policy, requests), (tokens, seconds) in sorted(sums.items(), key=lambda item: item[0][1]):
        rates[policy][str(requests)] = tokens / seconds
    return rates


def as_table(name: str, rates: Rates) -> str:
    """Tokens per second, and in brackets the share of the best policy that is not `adaptive`, by requests at once."""
    sizes = sorted({int(size) for row in rates.values() for size in row})
    lines = [f"{name}, tokens/s".ljust(20) + "".join(f"{size} at once".rjust(16) for size in sizes)]
    for policy, row in rates.items():
        line = f"  {policy}".ljust(20)
        for size in map(str, sizes):
            best = max((one.get(size, 0.0) for other, one in rates.items() if other != "adaptive"), default=0.0)
            known = size in row and best
            line += (f"{row[size]:,.0f} ({row[size] / best:.2f})" if known else "–").rjust(16)
        lines.append(line)
    return "\n".join(lines)


def draw(rates: dict[str, Rates], path: Path) -> None:
    """A panel for each engine; nothing where matplotlib is missing or nothing was measured."""
    try:
        import matplotlib
    except ImportError:
        return
    if not rates:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, panels = pyplot.subplots(1, len(rates), figsize=(5 * len(rates), 4.2), layout="constrained", squeeze=False)
    for panel, (name, table) in zip(panels[0], rates.items(), strict=True):
        for policy, row in table.items():
            first = policy == "adaptive"
            style = {"color": "black", "linewidth": 2.2, "zorder": 3} if first else {"linewidth": 1.2}
            panel.plot([int(number) for number in row], list(row.values()), marker=".", label=policy, **style)
        requests = sorted({int(number) for row in table.values() for number in row})
        panel.set(title=name, xlabel="requests at once", ylabel="tokens per second", xscale="log", yscale="log")
        panel.set_xticks(requests, labels=requests)
        panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.minorticks_off()
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    print(as_table("vLLM", json.loads(Path(sys.argv[1]).read_text())["tokens_per_s"]))
