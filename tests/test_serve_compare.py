"""A comparison counts the same requests for everybody, and shows what failed instead of averaging it away."""

import dataclasses
import io
import json

import numpy as np
import pytest
from rich.console import Console

from speclen.bench import marked
from speclen.bench.comparison import headline
from speclen.bench.comparison.compare import best_fixed, compare_runs, run_all
from speclen.bench.comparison.plot import plot
from speclen.bench.comparison.report import print_comparison, to_json, write_requests
from speclen.bench.serving.deployment import Contender, parse_contenders
from speclen.bench.serving.load import RequestOutcome
from speclen.bench.serving.run_track import TrackRun, failed_run
from speclen.bench.serving.tracks import make_track
from speclen.bench.serving.watch import Sample
from speclen.console.errors import UserError

TRACK = make_track("time-varying", 700.0, seed=1)
# Mean latency of each policy, in units of what the request takes at best.
SLOWNESS = {"adaptive": 1.0, "none": 2.0, "fixed:2": 1.2, "fixed:4": 1.4, "oracle": 1.0}
CONTENDERS = [Contender(name, name) for name in SLOWNESS]


def sample(at_s, steps):
    """Three rows per step, length 2, one token of the two accepted."""
    return Sample(at_s, 3, 0, steps, 3 * steps, 6 * steps, 6 * steps, 3 * steps, 0, "controller", ((1, 2),))


def make_run(contender, repeat, failed=(), track=TRACK, steps_per_s=40):
    rng = np.random.default_rng([repeat, list(SLOWNESS).index(contender.name)])
    outcomes = []
    for index, arrival in enumerate(track.arrivals):
        if index in failed:
            outcomes.append(RequestOutcome(index, arrival.at_s, arrival.at_s, error="UNAVAILABLE: gone"))
            continue
        latency = 0.01 * arrival.output_tokens * SLOWNESS[contender.name] * rng.lognormal(0, 0.1)
        first, end = arrival.at_s + 0.1 * latency, arrival.at_s + latency
        steps = arrival.output_tokens // 2
        outcomes.append(RequestOutcome(index, arrival.at_s, arrival.at_s, first, end, arrival.output_tokens, steps))
    samples = [sample(at_s, int(steps_per_s * at_s)) for at_s in np.arange(0, track.duration_s, 0.5)]
    return TrackRun(contender.name, repeat, outcomes, samples, {"worker": 90.0, "controller": 1.0}, track.duration_s)


def comparison_of(make=make_run, repeats=3, track=TRACK, contenders=CONTENDERS):
    return compare_runs(track, contenders, run_all(contenders, repeats, make), target_s_per_token=0.02)


def printed(comparison):
    out = io.StringIO()
    print_comparison(comparison, Console(file=out, width=120))
    return out.getvalue()


def test_runs_are_interleaved():
    order = []
    run_all(CONTENDERS, 2, lambda contender, repeat: order.append((contender.name, repeat)))
    assert order == [(name, repeat) for repeat in range(2) for name in SLOWNESS]


def test_what_was_complete_survives_an_interruption():
    def make(contender, repeat):
        if repeat == 2 and contender.name == "none":
            raise KeyboardInterrupt
        return make_run(contender, repeat)

    runs = run_all(CONTENDERS, 3, make)
    assert [run.repeat for run in runs] == [0] * 5 + [1] * 5
    notes = compare_runs(TRACK, CONTENDERS, runs, None, planned=3).notes
    assert "interrupted: 2 of 3 repeats are complete, and only they are shown" in notes
    with pytest.raises(KeyboardInterrupt):
        run_all(CONTENDERS, 1, lambda contender, repeat: make(contender, 2))


def test_a_run_that_never_started_counts_as_failed():
    def make(contender, repeat):
        if contender.name == "none" and repeat == 1:
            return failed_run("none", repeat, TRACK, "the worker did not start: out of memory")
        return make_run(contender, repeat)

    comparison = comparison_of(make)
    assert comparison.mean_latency_s("none") is None
    assert [summary.num_failed for summary in comparison.of("none")] == [0, len(TRACK.counted()), 0]
    assert "did not start: out of memory" in printed(comparison)


def test_ratios_are_those_of_the_policies_and_their_intervals_hold_them():
    comparison = comparison_of()
    found = {ratio.reference: ratio.interval for ratio in comparison.ratios if ratio.contender == "adaptive"}
    for reference in ("none", "fixed:2", "oracle"):
        assert found[reference].value == pytest.approx(1 / SLOWNESS[reference], rel=0.03)
        assert found[reference].low < 1 / SLOWNESS[reference] < found[reference].high
    assert best_fixed(comparison) == "fixed:2"
    assert comparison.notes == ()
    text = printed(comparison)
    assert "fixed:2 (best fixed)" in text
    assert "no difference shown" in text  # against the oracle


def test_a_summary_says_what_the_worker_did():
    summary = comparison_of().of("none")[0]
    assert summary.mean_batch_size == pytest.approx(3.0)
    assert summary.mean_length == pytest.approx(2.0)
    assert summary.cpu_share["controller"] == pytest.approx(1 / TRACK.duration_s)
    assert summary.num_counted == len(TRACK.counted())
    # 20 ms a token is what `none` takes on average, and twice what `adaptive` takes.
    assert summary.goodput_per_s < 0.8 * comparison_of().of("adaptive")[0].goodput_per_s


def test_failures_are_counted_and_shown_and_left_out_of_both_sides():
    counted = TRACK.counted()
    lost = set(counted[:7])

    def make(contender, repeat):
        return make_run(contender, repeat, failed=lost if contender.name == "none" else ())

    comparison = comparison_of(make)
    assert [summary.num_failed for summary in comparison.of("none")] == [7, 7, 7]
    assert [summary.num_failed for summary in comparison.of("adaptive")] == [0, 0, 0]
    left_out = {ratio.reference: ratio.num_left_out for ratio in comparison.ratios if ratio.contender == "adaptive"}
    assert left_out == {"none": 21, "fixed:2": 0, "fixed:4": 0, "oracle": 0}
    text = printed(comparison)
    assert "21 requests failed: none, UNAVAILABLE: gone" in text
    assert "21 failed requests left out" in text


def test_a_worker_that_died_makes_no_average_at_all():
    def make(contender, repeat):
        run = make_run(contender, repeat, failed=range(len(TRACK.arrivals)) if contender.name == "none" else ())
        run.worker_exit = "the worker ended with code 1: out of memory" if contender.name == "none" else ""
        return run

    comparison = comparison_of(make)
    assert comparison.mean_latency_s("none") is None
    assert best_fixed(comparison) == "fixed:2"
    text = printed(comparison)
    assert "nothing finished on both sides" in text
    assert "none, repeat 1: the worker ended with code 1: out of memory" in text


def test_counting_starts_when_the_learning_worker_has_settled():
    track = make_track("cold", 700.0)
    cold = comparison_of(lambda contender, repeat: make_run(contender, repeat, track=track), track=track)
    assert cold.from_s == pytest.approx(max(track.warm_up_s, 12.5), abs=1.0)  # 500 steps at 40 a second
    slow = comparison_of(lambda contender, repeat: make_run(contender, repeat, track=track, steps_per_s=1), track=track)
    assert any("500 steps" in note for note in slow.notes)


def test_a_short_run_and_a_late_client_say_so():
    track = dataclasses.replace(TRACK, arrivals=TRACK.arrivals[:20], warm_up_s=0.0)

    def make(contender, repeat):
        run = make_run(contender, repeat, track=track)
        for outcome in run.outcomes:
            outcome.sent_s += 0.5
        return run

    notes = comparison_of(make, repeats=1, track=track).notes
    assert any("too short for its intervals: 20 counted" in note for note in notes)
    assert any("load generator itself was late by 0.50 s" in note for note in notes)


def result(comparison):
    facts = {
        "quick": False,
        "machine": {"cores": 2, "processor": "AMD EPYC"},
        "worker": {"target": "bundled:target-60m"},
        "context": {"dtype": "bfloat16"},
    }
    return json.loads(json.dumps(to_json(comparison, facts)))


def test_everything_is_written_for_others_to_compute_with(tmp_path):
    comparison = comparison_of()
    assert result(comparison)["mean_latency_s"]["none"] == pytest.approx(comparison.mean_latency_s("none"))
    write_requests(comparison, tmp_path / "requests.jsonl")
    lines = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert len(lines) == 15 * len(TRACK.arrivals)
    plot(comparison, tmp_path / "plot.svg")
    assert "fixed:4" in (tmp_path / "plot.svg").read_text()
    with pytest.raises(UserError, match="no-such-folder"):
        plot(comparison, tmp_path / "no-such-folder" / "plot.png")


def test_the_headline_says_what_the_results_say(tmp_path):
    document = result(comparison_of())
    (tmp_path / "time-varying.json").write_text(json.dumps(document))
    block = headline.table(headline.read_results(tmp_path))
    row = next(line for line in block.splitlines() if "time-varying" in line).split("|")
    interval = next(
        r["interval"] for r in document["ratios"] if (r["contender"], r["reference"]) == ("adaptive", "none")
    )
    assert f"{100 * (1 - interval['value']):.0f}% lower" in row[2]
    assert "(fixed:2)" in row[3]
    assert row[4].strip() == "–"
    assert "no difference shown" in row[5]
    begin, end = marked.begin_of("headline"), marked.end_of("headline")
    readme = f"before\n{begin}\nold\n{end}\nafter\n"
    assert marked.insert(readme, "headline", block) == f"before\n{begin}\n{block}\n{end}\nafter\n"
    with pytest.raises(ValueError, match="markers"):
        marked.insert("no markers", "headline", block)
    (tmp_path / "quick.json").write_text(json.dumps(document | {"quick": True}))
    with pytest.raises(ValueError, match="--quick"):
        headline.read_results(tmp_path)


def test_contenders_are_what_the_worker_is_told(tmp_path):
    profile, oracle = tmp_path / "profile.json", tmp_path / "oracle.json"
    found = parse_contenders("adaptive, profile,none,fixed:1-2,oracle,fixed:2@local", 8, profile, oracle)
    assert [(c.name, c.policy, c.profile, c.seeded, c.local) for c in found] == [
        ("adaptive", "adaptive", profile, True, False),
        ("profile", "profile", profile, False, False),
        ("none", "none", None, False, False),
        ("fixed:1", "fixed:1", None, False, False),
        ("fixed:2", "fixed:2", None, False, False),
        ("oracle", "profile", oracle, False, False),
        ("fixed:2@local", "fixed:2", None, False, True),
    ]
    assert not parse_contenders("adaptive", 8, None, None)[0].seeded


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no policy"),
        ("adaptive,greedy", "'greedy'"),
        ("fixed:9", "fixed:0 to fixed:8"),
        ("none,none", "none twice"),
        ("profile", "speclen profile run"),
        ("adaptive@local", "adaptive@local"),
    ],
)
def test_a_policy_that_cannot_be_compared_is_named(text, words):
    with pytest.raises(UserError, match=words):
        parse_contenders(text, 8, None, None)
