"""Questions about vLLM with the plugin on a GPU, each answered by engines with different settings, one after the other.

    python -m speclen.bench.gpu.vllm_questions draft-model|eagle3|v1|hybrid --seconds 200 --out RESULT.json [--dry-run]

No controller runs: the plugin uses the configured table, and its reports are counted here. The last line begins with pass,
fail or skipped. A dry run needs vLLM's build for CPUs, see scripts/vllm_check; the V2 model runner is left out there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from speclen.bench.gpu.answers import Answer
from speclen.bench.gpu.vllm_engine import (
    CONTEXT_TOKENS,
    DRY,
    FULL,
    ROWS,
    Loop,
    Models,
    make_engine,
    set_environment,
    write_config,
)

UNREACHABLE = "127.0.0.1:9"  # nothing listens there
CLOCK = (0.97, 1.03)  # reported over true time of steps
ALIKE = 0.6  # agreement with length 0, relative to one fixed length: in 16 bits lengths break ties differently
STEPS_EACH = 5  # between two changes of the length


@dataclass(frozen=True, slots=True)
class EngineCase:
    """One engine. draft: a method of vLLM. speculative: further settings. measures: names of functions in this module."""

    name: str
    draft: str
    runner: str
    measures: tuple[str, ...]
    plugin: bool = True
    speculative: dict[str, Any] = field(default_factory=dict)


ADAPTIVE = {"enable_adaptive_verification": True}
QUESTIONS = {
    "draft-model": (
        EngineCase("vLLM alone", "draft_model", "v2", ("drafting",), plugin=False),
        EngineCase("plugin", "draft_model", "v2", ("drafting", "clock", "outputs")),
    ),
    "eagle3": (
        EngineCase("verification off", "eagle3", "v2", ("graphs",)),
        EngineCase("verification on", "eagle3", "v2", ("graphs",), plugin=False, speculative=ADAPTIVE),
        EngineCase("learned caps", "eagle3", "v2", ("graphs", "clock"), speculative=ADAPTIVE),
    ),
    "v1": (EngineCase("plugin", "draft_model", "v1", ("clock", "sampled")),),
    "hybrid": (EngineCase("lengths 3 and 0", "mtp", "default", ("outputs",)),),
}


def main() -> int:
    """Exit code 0 unless a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all engines")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--dry-run", action="store_true", help="with small models, on vLLM's build for CPUs")
    parser.add_argument("--row", help="the engine of this process, by its name")
    options = parser.parse_args()
    rows, models = {row.name: row for row in QUESTIONS[options.question]}, DRY if options.dry_run else FULL
    if options.row:
        run_row(rows[options.row], models, options.out)
        return 0
    answer, until = Answer(options.question, options.out), time.monotonic() + options.seconds
    found = {name: found_by(answer, name, sys.argv[1:], until) for name in rows}
    judge(answer, {name: facts for name, facts in found.items() if facts is not None}, options.dry_run)
    return answer.end()


def found_by(answer: Answer, name: str, arguments: list[str], until: float) -> dict[str, Any] | None:
    """Measurements of the engine of that name, from a separate process; None if it was skipped or failed."""
    out = answer.out.with_suffix(f".{name.replace(' ', '-')}.json")
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", __spec__.name, *arguments, "--row", name, "--out", str(out)]
    with out.with_suffix(".log").open("wb") as log:
        try:
            code: object = subprocess.run(
                command, stdout=log, stderr=log, timeout=max(1.0, until - time.monotonic())
            ).returncode
        except subprocess.TimeoutExpired:
            code = "no time"
    facts: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    answer.note(**{name: facts})
    if reason := facts.get("skipped"):
        answer.skip(name, reason)
        return None
    answer.check(f"{name} serves", code == 0, "" if code == 0 else f"({code}: see {out.with_suffix('.log').name})")
    return facts if "measured" in facts else None


def judge(answer: Answer, found: dict[str, dict[str, Any]], dry: bool) -> None:
    """Check the measurements of a question's engines. dry: ignore speed, since other processes run."""
    for name, facts in found.items():
        for size, ratio in facts.get("clock", {}).items():
            answer.check(
                f"{name}: times of {size} rows", dry or CLOCK[0] <= ratio <= CLOCK[1], f"{ratio:.3f} of the true ones"
            )
        if "outputs" in facts:
            alike, wanted = facts["outputs"], ALIKE * facts["one_length"]
            varied = facts["distinct"] > 8  # otherwise they could agree by chance
            answer.check(
                f"{name}: outputs", varied and alike >= wanted, f"{alike:.2f} alike, at one length {wanted / ALIKE:.2f}"
            )
        if "sampled" in facts:
            answer.check(f"{name}: top-p and a grammar", facts["sampled"])
        hits = facts.get("graphs", {}).get("share_full", {})
        if hits:
            answer.check(f"{name}: full graphs", min(hits.values()) >= 0.5, str(hits))
    alone, plugin = found.get("vLLM alone"), found.get("plugin")
    if alone and plugin and "draft_ms" in plugin:
        blocks = plugin["kv_blocks"] / alone["kv_blocks"]
        answer.check("KV blocks", blocks >= 0.95, f"{blocks:.3f} of those of vLLM alone")
        short, long = (plugin["draft_ms"].get(key) for key in ("1", "8"))
        if short and long and not dry:
            answer.check("drafting follows the length", short < 0.6 * long, f"{short:.2f} ms at 1, {long:.2f} at 8")


# In the process of one engine.


def run_row(row: EngineCase, models: Models, out: Path) -> None:
    """Write the engine's measurements, after each one."""
    facts: dict[str, Any] = {"row": asdict(row)}

    def write() -> None:
        out.write_text(json.dumps(facts, indent=1))

    runner = "v1" if models.device == "cpu" else row.runner
    set_environment(models, runner, UNREACHABLE)
    if runner == "default":
        del os.environ["VLLM_USE_V2_MODEL_RUNNER"]
    if reason := why_not(row, models):
        facts["skipped"] = reason
        write()
        return
    said = Sentences()
    logging.getLogger("vllm").addHandler(said)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(row, models, Path(folder))
        loop = Measured(engine, models)
        facts["start_s"] = round(time.monotonic() - begun, 1)
        facts["kv_blocks"] = engine.vllm_config.cache_config.num_gpu_blocks
        facts["v2"] = engine.vllm_config.use_v2_model_runner
        if row.plugin and loop.steering is None:
            refusals = [sentence for sentence in said.sentences if "speclen is off" in sentence]
            facts["skipped"] = (refusals or ["the plugin is off, and no line says why"])[-1]
            write()
            return
        for name in row.measures:
            MEASURES[name](loop, facts)
            facts["measured"] = [*facts.get("measured", ()), name]
            write()


def why_not(row: EngineCase, models: Models) -> str:
    """Reason why an engine cannot run here; "" if it can."""
    from vllm.config import SpeculativeConfig

    on_cpu = models.device == "cpu"
    if not row.speculative.keys() & ADAPTIVE.keys():
        return ""
    if not ADAPTIVE.keys() <= SpeculativeConfig.__dataclass_fields__.keys():
        return "this vLLM has no adaptive verification"
    return "vLLM verifies adaptively on its V2 model runner alone" if on_cpu else ""


class Sentences(logging.Handler):
    """Lines of vLLM's log."""

    def __init__(self) -> None:
        super().__init__()
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.sentences.append(record.getMessage())


def engine_of(row: EngineCase, models: Models, folder: Path) -> Any:
    """The engine of a row, with all of the device's memory for keys and values."""
    longest = models.lengths[-1]
    speculative: dict[str, Any] = {"method": row.draft, **row.speculative}
    table, changes = [[1, 4, longest], [5, 8, 3], [9, 16, 1], [17, 24, 0], [25, ROWS, 3]], dict[str, Any]()
    if row.draft == "eagle3":
        head = write_random_head(models, folder / "eagle3")
        speculative |= {"model": str(head), "draft_load_config": {"load_format": "dummy"}}
    elif row.draft == "mtp":
        register_random()
        speculative["num_speculative_tokens"], table = 3, [[1, 16, 3], [17, ROWS, 0]]
        changes = {"model": str(write_hybrid(models, folder / "hybrid")), "load_format": "random", "dtype": "bfloat16"}
    return make_engine(models, folder, table, speculative, row.plugin, **changes)


def write_random_head(models: Models, folder: Path) -> Path:
    """The configuration of an EAGLE-3 head of one layer for the target."""
    write_config(models.target, models.dtype, folder)
    content = json.loads((folder / "config.json").read_text())
    num_layers = content["num_hidden_layers"]
    content["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, num_layers // 2, num_layers - 1]}
    content |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": content["vocab_size"],
    }
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def register_random() -> None:
    """Register the load format "random": vLLM's dummy weights, scaled to those of an untrained model. Unscaled, every prompt
    gives one token repeatedly.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("random")
    class Random(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)  # uniform within 0.001 of 0
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.data.mul_(1e3 * (3 / weight.shape[-1]) ** 0.5)


def write_hybrid(models: Models, folder: Path) -> Path:
    """The configuration of a small GDN hybrid with an MTP layer; its weights are random."""
    from transformers import Qwen3NextConfig

    from speclen.worker.models.loading import load_tokenizer

    tokenizer = load_tokenizer(models.target)
    config = Qwen3NextConfig(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=4,  # the last with full attention
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        architectures=["Qwen3NextForCausalLM"],
        dtype="bfloat16",
    )
    config.update({"num_nextn_predict_layers": 1})
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Measured(Loop):
    """A loop whose numbers of steps and tokens suit the device."""

    def __init__(self, engine: Any, models: Models) -> None:
        super().__init__(engine)
        self.lengths = models.lengths
        self.num_steps, self.num_first, self.num_tokens = (200, 10, 48) if models.device == "cuda" else (4, 1, 8)

    def steady(self, num_rows: int, num_steps: int, before: Callable[[int], None] = lambda step: None) -> float:
        """Seconds that num_steps steps of num_rows requests take, after some that are not measured.

        before: called with each step's number.
        """
        names = [self.add(prompt_of(number), CONTEXT_TOKENS - 200) for number in range(num_rows)]
        for _ in range(self.num_first):
            self.engine.step()
        begun = time.perf_counter()
        for step in range(num_steps):
            before(step)
            self.engine.step()
        seconds = time.perf_counter() - begun
        self.engine.abort_request(names, internal=False)
        self.drain()
        return seconds

    def changing(self, lengths: tuple[int, ...]) -> Callable[[int], None]:
        """One length after the other, each for some steps."""
        return lambda step: self.use(lengths[step // STEPS_EACH % len(lengths)])


def prompt_of(number: int) -> list[int]:
    return [7 + (31 * number + at) % 1500 for at in range(64 + number)]


def drafting(loop: Measured, facts: dict[str, Any]) -> None:
    """Milliseconds of drafting and of whole steps, at each length and 16 sequences."""
    facts["draft_ms"], facts["step_ms"] = {}, {}
    for length in loop.lengths:
        loop.use(length)
        with timed_drafts(loop.core) as drafts:
            seconds = loop.steady(16, loop.num_steps // 4)
        facts["step_ms"][str(length)] = 1e3 * seconds / (loop.num_steps // 4)
        facts["draft_ms"][str(length)] = drafts.median_ms()


class Drafts:
    """Times of calls on the device: pairs of events, or seconds on a CPU."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []

    def median_ms(self) -> float:
        """0 without any."""
        times = sorted(1e3 * (b - a) if isinstance(a, float) else a.elapsed_time(b) for a, b in self.pairs)
        return float(times[len(times) // 2]) if times else 0.0


@contextmanager
def timed_drafts(core: Any) -> Iterator[Drafts]:
    """Time the drafter of either model runner; the device is synchronised after the block."""
    import torch

    runner, found = core.model_executor.driver_worker.worker.model_runner, Drafts()
    drafter = getattr(runner, "speculator", None) or runner.drafter
    propose, on_gpu = drafter.propose, torch.cuda.is_available()

    def now() -> Any:
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = now()
        result = propose(*args, **kwargs)
        found.pairs.append((begun, now()))
        return result

    drafter.propose = timed
    try:
        yield found
    finally:
        del drafter.propose
        if on_gpu:
            torch.cuda.synchronize()


def clock(loop: Measured, facts: dict[str, Any]) -> None:
    """Ratio of reported to true step times, for few and many sequences."""
    loop.use(None)
    reported: list[tuple[float, float]] = []  # when, and seconds of the step
    report = loop.steering.control.report

    def noted(record: Any) -> Any:
        reported.append((time.perf_counter(), record.latency_s))
        return report(record)

    loop.steering.control.report = noted
    facts["clock"] = {}
    for num_rows in (2, 16, ROWS):
        reported.clear()
        loop.steady(num_rows, loop.num_steps)
        steps = reported[loop.num_first : loop.num_first + loop.num_steps]
        if len(steps) > 1:
            facts["clock"][str(num_rows)] = sum(seconds for _, seconds in steps[1:]) / (steps[-1][0] - steps[0][0])
    loop.steering.control.report = report


def outputs(loop: Measured, facts: dict[str, Any]) -> None:
    """Share of greedy tokens before the first difference from length 0, with one length and with several."""
    lengths = (3, 0) if facts["row"]["draft"] == "mtp" else loop.lengths
    prompts = [prompt_of(number) for number in range(8)]
    expected = loop.outputs(prompts, loop.num_tokens, lambda step: loop.use(0))
    facts["distinct"] = len({token for tokens in expected for token in tokens})
    for name, before in (("one_length", lambda step: loop.use(max(lengths))), ("outputs", loop.changing(lengths))):
        found = loop.outputs(prompts, loop.num_tokens, before)
        facts[name] = sum(map(num_alike, found, expected)) / (len(expected) * loop.num_tokens)


def num_alike(tokens: list[int], others: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), len(tokens))


def sampled(loop: Measured, facts: dict[str, Any]) -> None:
    """Check that requests with top-p and with a grammar end correctly."""
    from vllm.sampling_params import StructuredOutputsParams

    loop.use(None)
    names = {loop.add(prompt_of(number), loop.num_tokens, temperature=0.7, top_p=0.9): 0 for number in range(8)}
    choice = {
        "structured_outputs": StructuredOutputsParams(choice=["yes", "no"]),
        "detokenize": True,
        "ignore_eos": False,
    }
    asked, text = loop.add(prompt_of(9), loop.num_tokens, **choice), ""
    while loop.engine.has_unfinished_requests():
        for output in loop.engine.step():
            if output.request_id == asked:
                text += output.outputs[0].text
            else:
                names[output.request_id] += len(output.outputs[0].token_ids)
    loop.drain()
    facts["sampled"] = text in ("yes", "no") and set(names.values()) == {loop.num_tokens}


def graphs(loop: Measured, facts: dict[str, Any]) -> None:
    """Share of the target's decoding passes that run in full graphs, by length, while lengths change."""
    facts["graphs"] = {"share_full": {}}
    try:
        from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager as Manager
    except ImportError as error:
        facts["graphs"]["not_counted"] = str(error)
        return
    found: defaultdict[int, Counter[str]] = defaultdict(Counter)
    dispatch = Manager.dispatch

    def counted(
        self: Any, num_reqs: int, num_tokens: int, uniform_token_count: int | None, *rest: Any, **more: Any
    ) -> Any:
        result = dispatch(self, num_reqs, num_tokens, uniform_token_count, *rest, **more)
        if type(self) is Manager and uniform_token_count is not None:
            found[uniform_token_count - 1][result.cg_mode.name] += 1
        return result

    Manager.dispatch = counted
    lengths = tuple(dict.fromkeys(loop.configured[1:]))
    loop.steady(16, loop.num_steps, loop.changing(lengths))
    Manager.dispatch = dispatch
    facts["graphs"] |= {
        "by_length": {str(length): dict(counts) for length, counts in found.items()},
        "share_full": {str(k): counts["FULL"] / counts.total() for k, counts in found.items() if k in lengths},
    }


MEASURES = {each.__name__: each for each in (drafting, clock, outputs, sampled, graphs)}

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # an engine takes long to end
