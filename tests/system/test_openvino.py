"""OpenVINO runs the models that pass its check; torch runs all others, after one log line."""

import copy
import logging
import random
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from speclen.worker.backends import openvino, threads
from speclen.worker.backends.kv_cache import no_room
from speclen.worker.backends.torch.cached_model import CachedModel
from speclen.worker.config import WorkerConfig
from speclen.worker.engine.preparation import EngineConfig, PreparedPair, prepare
from speclen.worker.frontend import worker_server
from speclen.worker.models.naming import ModelError
from speclen.worker.requests.request import FinishReason
from tests.support import engines, tiny_models
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(engines.WHY_NOT_OPENVINO is not None, reason=f"OpenVINO: {engines.WHY_NOT_OPENVINO}")


def fallen_back(caplog: pytest.LogCaptureFixture, family: str = "llama", **settings: Any) -> str:
    """Why torch runs the pair although OpenVINO may."""
    pair = engines.make_pair(family, **settings)
    with caplog.at_level(logging.INFO):
        prepared = prepare(pair, EngineConfig(max_batch_size=2))
    assert isinstance(prepared.target, CachedModel)
    assert isinstance(prepared.draft, CachedModel)
    assert prepared.backend.startswith("torch ")
    (told,) = [record.getMessage() for record in caplog.records if "OpenVINO" in record.getMessage()]
    assert "\n" not in told
    with pytest.raises(ModelError, match="--backend openvino: "):
        prepare(pair, EngineConfig(max_batch_size=2, backend="openvino"))
    return told


def test_openvino_is_chosen_where_it_runs():
    prepared: PreparedPair = prepare(engines.make_pair("llama"), EngineConfig(max_batch_size=2))
    assert prepared.backend == f"openvino {openvino.installed_version()}"
    assert not isinstance(prepared.target, CachedModel)


def test_unsupported_attention_falls_back_to_torch(caplog):
    assert "softcap" in fallen_back(caplog, "gemma2")


def test_a_wrong_conversion_is_caught(caplog, monkeypatch):
    """As if it lost Mistral's window: logits differ by some 0.3 then."""
    honest = openvino.load

    def without_window(model: Any, *others: Any) -> Any:
        wrong = copy.deepcopy(model)
        wrong.config.sliding_window = None
        for layer in wrong.model.layers:
            layer.self_attn.sliding_window = None
        return honest(wrong, *others)

    monkeypatch.setattr(openvino, "load", without_window)
    assert "gives other logits in ragged batches than alone (by 0." in fallen_back(caplog, "mistral")


def test_openvino_sends_no_telemetry():
    """Story: openvino-telemetry, a dependency, reported every import to its vendor from a fork of this process."""
    code = "import speclen.worker.backends.openvino.model, openvino, sys; print(*sys.modules, sep='\\n')"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    ).stdout
    assert "openvino.tools.ovc" in told.split()
    assert not [name for name in told.split() if name.startswith("openvino_telemetry.")]


def test_sequences_that_do_not_fit_into_memory_fall_back_to_torch(caplog, monkeypatch):
    def reserve(*sizes: int) -> None:
        raise no_room(*sizes)

    blocks = pytest.importorskip("speclen.worker.backends.openvino.blocks")
    monkeypatch.setattr(blocks, "reserve", reserve)
    assert re.search(r"2 sequences of .* GiB of KV memory, more than there is: lower", fallen_back(caplog))


def test_changing_threads_compiles_nothing_while_serving(tmp_path, monkeypatch):
    """The first request on a busy machine took four seconds, the next one 0.3."""
    monkeypatch.setattr(threads, "usable_cores", lambda: {0, 1})
    monkeypatch.setattr(threads, "PARAMETERS_PER_THREAD", 1)
    before = torch.get_num_threads()
    try:
        target, _ = tiny_models.save_pair("llama", tmp_path)
        config = WorkerConfig(target=target, controller="", device="cpu", dtype="float32", backend="openvino")
        engine = worker_server.load(config, lambda line: None)[1]
        monkeypatch.setattr(pytest.importorskip("openvino").Core, "compile_model", None)
        engine.use_threads(1)
        collected = engines.generate(engine, engines.request("a", [3, 4, 5], max_tokens=4, ignore_eos=True))
        assert collected.last("a").finish_reason is FinishReason.LENGTH
        assert (engine.num_threads, torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3}])
def test_cached_prompts_do_not_change_outputs(sampling):
    """60 requests over three beginnings, joining at random, at lengths that change every step; few blocks are remembered."""
    generator = random.Random(5)
    beginnings = [[generator.randrange(1, 320) for _ in range(size)] for size in (64, 100, 150)]
    requests = [
        engines.request(
            str(number),
            generator.choice(beginnings)[: generator.randint(30, 150)] + engines.random_prompt(generator, 20),
            max_tokens=generator.randint(1, 30),
            ignore_eos=True,
            **sampling,
        )
        for number in range(60)
    ]
    outputs, reused = [], []
    for cached in (0, 320):
        engine = engines.make_engine(
            chooser=engines.RandomLengths(4), backend="openvino", max_cached_tokens=cached, max_batch_size=5
        )
        collected = engines.generate(engine, *requests)
        outputs.append([collected.ids(one.request_id) for one in requests])
        reused.append(engine.load().num_reused_tokens)
    assert outputs[0] == outputs[1]
    assert reused[0] == 0
    assert reused[1] > 1500
