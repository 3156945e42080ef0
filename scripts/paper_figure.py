"""The paper's question in one picture: which length is best at which batch size, and what it gains, here and there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from speclen.cli.profile.analysis import Analysis

# The paper's, by batch size.
PAPER_LENGTHS = {1: 7, 2: 6, 4: 4, 8: 4, 16: 3, 32: 1}
PAPER_GAINS = {1: 2.73, 32: 1.31}

FLAT = 1.03  # lengths within so many times the best one's time per token are as good as it


def plot_lengths(analyses: Mapping[str, Analysis], path: Path) -> None:
    """Left the best length by batch size, with the lengths that are as good; right the gain over length 0."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "speclen"
    from matplotlib import pyplot as plt

    figure, (lengths, gains) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for title, analysis in analyses.items():
        sizes = [batch.batch_size for batch in analysis.batches]
        (line,) = lengths.plot(sizes, [batch.best_length for batch in analysis.batches], "o-", label=f"here, {title}")
        good = [
            [length for length, ms in batch.ms_per_token.items() if ms <= FLAT * batch.ms_per_token[batch.best_length]]
            for batch in analysis.batches
        ]
        lengths.fill_between(sizes, [min(g) for g in good], [max(g) for g in good], color=line.get_color(), alpha=0.15)
        gains.plot(sizes, [batch.gain for batch in analysis.batches], "o-", label=f"here, {title}")
    lengths.plot(list(PAPER_LENGTHS), list(PAPER_LENGTHS.values()), "ks--", label="paper")
    gains.plot(list(PAPER_GAINS), list(PAPER_GAINS.values()), "ks", label="paper")
    lengths.set(ylabel="best length (shaded: within 3% of it)", ylim=(-0.3, None))
    gains.set(ylabel="times the speed of length 0", ylim=(0, None))
    gains.axhline(1.0, color="grey", linewidth=0.7)
    for axis in (lengths, gains):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("batch size")
        axis.legend(fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
