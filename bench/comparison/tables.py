"""Tables of docs/results/README.md, from the results that are committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speclen.bench.comparison import gpu_table, paper_table, peers_table
from speclen.bench.comparison.document import comparison_of, read_document
from speclen.bench.comparison.outputs import MAX_EXAMINED
from speclen.bench.comparison.rounds import Comparison, Ratio, is_fixed
from speclen.bench.comparison.stats import LEAST_BLOCKS, Interval
from speclen.bench.serving.recipes import SCENARIOS

# heading, policy that the row's is put against; the best fixed length differs by track
COLUMNS = (
    ("no speculation", "none"),
    ("best fixed length", None),
    ("n-grams alone", "n-gram"),
    ("frozen table", "profile"),
    ("paper's model", "paper"),
    ("oracle of lengths", "oracle"),
)
# track, reference (None: best fixed), aim for the ratio of mean latencies
AIMS = (
    ("mixed", None, 0.88),
    ("mixed", "oracle", 0.95),
    ("copying", None, 0.65),
    ("steady-low", None, 1.03),
    ("steady-high", None, 1.03),
    ("wrong-profile", "profile", 0.80),
)
AIMS_HEAD = ("| track | against | aim | measured | |", "|---|---|---|---|---|")
COLD_AIM = 1.05
CLOSED_AIM = 1.02  # at every number of requests at a time, against the best of all policies there
# The track whose picture README shows.
SHOWN = "mixed"


def read_results(folder: Path, place: str = "") -> dict[str, dict[str, Any]]:
    """By track, in the order of the tracks. place: of the folder, from the page that links to its files.

    Raises ValueError for a file that is no comparison, or of a --quick run.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        if path.name.startswith(("survey", "profile")):
            continue
        document = read_document(path)
        if document["quick"]:
            raise ValueError(f"{path} comes from --quick: run it again without")
        found[document["track"]] = document | {"file": place + path.name}
    order = [*SCENARIOS, *found]
    return dict(sorted(found.items(), key=lambda item: order.index(item[0])))


def with_arrivals(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The tracks whose requests arrive at a load; the others, with so many requests at a time, are told by number."""
    return {track: document for track, document in results.items() if not document.get("at_once")}


def ratio_table(results: dict[str, dict[str, Any]]) -> str:
    """adaptive against the others, a row a track."""
    return "\n".join([*ratio_rows(results), "", *footnotes(results)])


def ratio_rows(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        f"| mean latency of `adaptive` against | {' | '.join(heading for heading, _ in COLUMNS)} |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for track, document in with_arrivals(results).items():
        comparison = comparison_of(document)
        cells = [ratio_cell(comparison, reference) for _, reference in COLUMNS]
        lines.append(f"| [`{track}`]({document['file']}) | {' | '.join(cells)} |")
    return lines


def ratio_cell(comparison: Comparison, reference: str | None) -> str:
    """reference: None for the best fixed length, which is named, and out of how many."""
    name = reference or comparison.best_fixed()
    if name is None or name not in comparison.policies:
        return "–"
    ratio = comparison.ratio("adaptive", name)
    if ratio.interval is None:
        return "–"
    text = in_words(ratio.interval, ratio.num_blocks)
    if reference is None:
        text += f" (`{name}` of {sum(map(is_fixed, comparison.policies))})"
    return text + fewer_rounds(ratio, comparison)


def fewer_rounds(ratio: Ratio, comparison: Comparison) -> str:
    """Who was dropped early was not measured for as long as the others."""
    return "" if ratio.num_blocks == len(comparison.rounds) else f", {ratio.num_blocks} rounds"


def in_words(interval: Interval, num_blocks: int) -> str:
    """ "0.82 (0.80 to 0.84)"; bold where the interval shows a difference."""
    text = f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"
    return f"**{text}**" if shows_difference(interval, num_blocks) else text


def with_width(interval: Interval) -> str:
    """ "0.82 ±2%"."""
    return f"{interval.value:.2f} ±{100 * interval.half_width:.0f}%"


def shows_difference(interval: Interval, num_blocks: int) -> bool:
    """Intervals of fewer blocks than LEAST_BLOCKS cover less often than they say."""
    return num_blocks >= LEAST_BLOCKS and not interval.low <= 1.0 <= interval.high


def footnotes(results: dict[str, dict[str, Any]]) -> list[str]:
    """What the figures were measured on, and what takes away from them."""
    if not results:
        return ["Nothing has been measured yet."]
    reading = (
        f"Below 1 `adaptive` is faster; in brackets 95% confidence over blocks; bold where that excludes 1 and there are at "
        f"least {LEAST_BLOCKS} of them. The best fixed length is the best of those that took part by the same blocks, which "
        f"favours it. "
    )
    first, *others = what_was_served(results)
    return [reading + first, *others]


def what_was_served(results: dict[str, dict[str, Any]]) -> list[str]:
    """Rounds, place, outputs, and what takes away from them."""
    rounds = [f"{track} {r['num_rounds']}" for track, r in results.items()]
    outputs = [one for r in results.values() for one in r["outputs"]]
    same, compared = sum(one["num_same"] for one in outputs), sum(one["num_compared"] for one in outputs)
    alike = (
        f"Of {compared:,} pairs of outputs, of one request under two policies, {same:,} were the same in every token."
    )
    if compared > same:
        worst = max(one["worst_miss_logits"] for one in outputs)
        ties = sorted(
            {f"{r['outputs'][0]['tie_logits']:g} is allowed in {r['context']['dtype']}" for r in results.values()}
        )
        alike += (
            f" Of the other {compared - same:,} the first difference was examined in "
            f"{sum(o['num_examined'] for o in outputs):,}, chosen at random where a run had more than {MAX_EXAMINED}: all "
            f"are ties for the target alone, at most {worst:.2g} logits apart, where {' and '.join(ties)}. What comes after "
            "a first difference is not compared."
        )
    notes = [f"Rounds: {', '.join(rounds)}. {made_where(results)}", "", alike]
    for track, r in results.items():
        remarks = [note for note in comparison_of(r).notes() if "dropped" not in note]
        notes += ["", f"`{track}`: {'; '.join(remarks)}."] if remarks else []
    return notes


def made_where(results: dict[str, dict[str, Any]]) -> str:
    """Which tracks were measured together: on the same machine, in the same precision, of the same commit."""
    made: dict[str, list[str]] = {}
    for track, r in results.items():
        model = r["machine"].get("processor_model")  # not told by results of before it was written down
        machine = f"{r['machine']['cores']} cores of {r['machine']['processor']}{f' ({model})' if model else ''}"
        pair = f"{r['worker']['target']} ({r['context']['dtype']})"
        place = f"{machine}, {pair}, commit `{r['commit']}`"
        made.setdefault(place, []).append(f"`{track}`")
    return " ".join(f"{place}: {', '.join(tracks)}." for place, tracks in made.items())


def aims_table(results: dict[str, dict[str, Any]], peers: Path) -> str:
    """What was aimed at and what was measured; peers: the file of throughput beside other programs."""
    missing = [
        f"| `{track}` | {reference or 'best fixed length'} | {aim:.2f} | not measured | |"
        for track, reference, aim in AIMS
        if track not in results
    ]
    return "\n".join([*AIMS_HEAD, *aims_rows(results), *missing, *peers_table.aims(peers)])


def aims_rows(results: dict[str, dict[str, Any]]) -> list[str]:
    """Those of the tracks that were measured."""
    lines = []
    for track, reference, aim in [one for one in AIMS if one[0] in results]:
        comparison = comparison_of(results[track])
        name = reference or str(comparison.best_fixed())
        ratio = comparison.ratio("adaptive", name)
        lines.append(
            aim_row(track, reference or f"best fixed length (`{name}`)", aim, ratio.interval, ratio.num_blocks)
        )
    if "cold" in results:
        comparison = comparison_of(results["cold"])
        ratio = comparison.ratio("cold", "adaptive", settled=True)
        lines.append(aim_row("cold", "the same, warm, after 1,000 steps", COLD_AIM, ratio.interval, ratio.num_blocks))
    for track, document in results.items():
        if document.get("at_once"):
            lines.append(closed_aim(track, document))
    return lines


def closed_aim(track: str, document: dict[str, Any]) -> str:
    """Of the number of requests at a time at which adaptive is furthest behind the best of all policies.

    That is the worst of many by chance, too: the interval holds for all of them at once (Bonferroni).
    """
    found: list[tuple[float, int, Ratio]] = []
    for size, part in zip(document["at_once"], comparison_of(document).parts, strict=True):
        ratios = [part.ratio("adaptive", name) for name in document["policies"][1:]]
        found += [(ratio.interval.value, size, ratio) for ratio in ratios if ratio.interval is not None]
    if not found:
        return aim_row(track, "the best of all", CLOSED_AIM, None)
    _, size, worst = max(found, key=lambda one: one[0])
    assert worst.interval is not None
    words = f"whoever is furthest ahead, of {len(found)}: at {size} at a time `{worst.reference}`"
    interval = worst.interval.of_several(len(found), worst.num_blocks)
    return aim_row(track, words, CLOSED_AIM, interval, worst.num_blocks)


def aim_row(track: str, against: str, aim: float, interval: Interval | None, num_blocks: int = 0) -> str:
    if interval is None:
        return f"| `{track}` | {against} | {aim:.2f} | not measured | |"
    fate = "reached" if interval.value <= aim else "missed"
    if interval.low <= aim <= interval.high:
        fate += ", within the interval"
    return f"| `{track}` | {against} | {aim:.2f} | {in_words(interval, num_blocks)} | {fate} |"


def policies_table(results: dict[str, dict[str, Any]]) -> str:
    """Every policy's latency over adaptive's, a column a track: over 1 is slower than adaptive."""
    results = with_arrivals(results)
    names = list(dict.fromkeys(name for r in results.values() for name in r["policies"] if name != "adaptive"))
    comparisons = {track: comparison_of(r) for track, r in results.items()}
    lines = [f"| latency over that of `adaptive` | {' | '.join(f'`{track}`' for track in results)} |"]
    lines.append("|---|" + "---|" * len(results))
    for name in names:
        lines.append(f"| `{name}` | {' | '.join(cell_of(c, name) for c in comparisons.values())} |")
    return "\n".join(lines)


def cell_of(comparison: Comparison, name: str) -> str:
    if name not in comparison.policies:
        return "–"
    ratio = comparison.ratio(name, "adaptive")
    if ratio.interval is None:
        return "–"
    return with_width(ratio.interval) + fewer_rounds(ratio, comparison)


def closed_table(results: dict[str, dict[str, Any]]) -> str:
    """Every policy's latency over adaptive's, by requests at a time: over 1 is slower than adaptive."""
    closed = {track: document for track, document in results.items() if document.get("at_once")}
    if not closed:
        return "Nothing has been measured yet."
    sizes = sorted({size for document in closed.values() for size in document["at_once"]})
    lines = [f"| latency over that of `adaptive` | requests at a time: {' | '.join(map(str, sizes))} |"]
    lines.append("|---|" + "---|" * len(sizes))
    for track, document in closed.items():
        parts = dict(zip(document["at_once"], comparison_of(document).parts, strict=True))
        for name in document["policies"][1:]:
            cells = [closed_cell(parts[size], name) if size in parts else "–" for size in sizes]
            lines.append(f"| [`{track}`]({document['file']}), `{name}` | {' | '.join(cells)} |")
        blocks = [str(len(parts[size].rounds)) if size in parts else "–" for size in sizes]
        lines.append(f"| blocks of `{track}` | {' | '.join(blocks)} |")
    return "\n".join(lines)


def closed_cell(part: Comparison, name: str) -> str:
    """Bold where the interval shows a difference."""
    ratio = part.ratio(name, "adaptive")
    if ratio.interval is None:
        return "–"
    text = with_width(ratio.interval)
    return f"**{text}**" if shows_difference(ratio.interval, ratio.num_blocks) else text


def tables(folder: Path) -> dict[str, str]:
    """Everything between markers, by name."""
    results = read_results(folder / "serve", "serve/")
    return {
        "figure": picture_of(SHOWN, results, "serve/"),
        "figure_copying": picture_of("copying", results, "serve/"),
        "headline": ratio_table(results),
        "elsewhere": elsewhere(folder / "serve"),
        "aims": aims_table(results, folder / "peers.json"),
        "policies": policies_table(results),
        "closed": closed_table(results),
        "paper": paper_table.table(folder / "lengths.json"),
        "gpu_lengths": gpu_table.lengths_table(folder / "gpu" / "gpu_check.json"),
        "gpu_passes": gpu_table.passes_table(folder / "gpu" / "passes-torch.json", folder / "gpu" / "gpu_check.json"),
        "gpu_attention": gpu_table.attention_table(folder / "gpu" / "attention.json"),
        "peers": peers_table.table(folder / "peers.json"),
        "readme": in_sentences(results),
        "readme_figure": picture_of(SHOWN, results, "docs/results/serve/"),
    }


def elsewhere(folder: Path) -> str:
    """What was served on other machines: of each folder in this one, its tracks, as the first tables have them."""
    found = []
    for place in sorted(folder.glob("*/")):
        if results := read_results(place, f"{folder.name}/{place.name}/"):
            found.append("\n".join([f"### `{place.name}`", "", *of_a_machine(results)]))
    return "\n\n".join(found) or "Nothing has been measured on another machine yet."


def of_a_machine(results: dict[str, dict[str, Any]]) -> list[str]:
    """Tracks with arrivals; those with so many requests at a time; what was aimed at; what was served."""
    lines = [*ratio_rows(results), "", policies_table(results), ""] if with_arrivals(results) else []
    if len(with_arrivals(results)) < len(results):
        lines += [closed_table(results), ""]
    if aims := aims_rows(results):
        lines += [*AIMS_HEAD, *aims, ""]
    return [*lines, *what_was_served(results)]


def picture_of(track: str, results: dict[str, dict[str, Any]], place: str) -> str:
    """A link to the track's picture, once there is one. place: of the pictures, from the page."""
    return (
        f"![Latency, rows in a step and tokens proposed, by second of a block]({place}{track}.svg)"
        if track in results
        else ""
    )


def in_sentences(results: dict[str, dict[str, Any]]) -> str:
    """What README says about latency: of the track that is shown there, and of text that repeats its prompts."""
    if SHOWN not in results:
        return "What that is worth has not been measured in this state."
    document = results[SHOWN]
    cores, target, learned_s = document["machine"]["cores"], document["worker"]["target"], document.get("learn_s", 0.0)
    seed = "" if document["profile"] is None else " an offline profile to begin with,"
    first = (
        f"On {cores} CPU cores with `{target}`,{seed} a load that varies, and {learned_s / 60:g} minutes of it\n"
        f"to learn from, mean latency with requests of all kinds and temperatures is (commit `{document['commit']}`)\n"
    )
    found = first + against_others(document)
    if "copying" in results:
        copying = results["copying"]
        found += "\nWith edits, extraction and quotes, whose answers repeat their prompts, it is"
        found += f" (commit `{copying['commit']}`)\n{against_others(copying)}"
    return found


def against_others(document: dict[str, Any]) -> str:
    comparison = comparison_of(document)
    best = comparison.best_fixed()
    named = {
        "none": "plain decoding's",
        best: "plain decoding's, the best fixed length"
        if best == "none"
        else f"that of the best fixed length (`{best}`)",
        "n-gram": "that of n-grams alone",
        "profile": "that of a frozen table",
    }
    found = []
    for name, words in named.items():
        ratio = comparison.ratio("adaptive", str(name))
        if interval := ratio.interval:
            spread = f"{interval.low:.2f} to {interval.high:.2f}{fewer_rounds(ratio, comparison)}"
            found.append(f"{interval.value:.2f} times {words} ({spread})")
    return ",\n".join(found) + "."
