"""SGLang's own parser takes the tables that `speclen export --format sglang` writes."""

import importlib.util
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest

from speclen.cli.export import Range, to_sglang

WHEEL = "sglang==0.5.23"
MODULE = "sglang/srt/speculative/adaptive_spec_params.py"
IMPORTED = {  # by that module: what it does not need to read a table
    "arg_groups.overrides": {"resolved_view": None, "resolving_view": None},
    "runtime_context": {"attn_dp_enabled_of": None},
    "speculative.spec_info": {"SpeculativeAlgorithm": None},
    "utils": {"log_info_on_rank0": lambda logger, line: None},
}


@pytest.fixture
def parser(tmp_path, monkeypatch):
    """SGLang's module for the table, out of its wheel, alone."""
    download = ["-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--dest", tmp_path, WHEEL]
    done = subprocess.run([sys.executable, *map(str, download)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{WHEEL} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extract(MODULE, tmp_path)
    for name, content in IMPORTED.items():
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", SimpleNamespace(**content))
    spec = importlib.util.spec_from_file_location("adaptive_spec_params", tmp_path / MODULE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sglang_drafts_the_exported_lengths(parser, tmp_path):
    ranges = [Range(1, 4, 5), Range(5, 16, 2), Range(17, 32, 0)]
    (tmp_path / "table.json").write_text(to_sglang(ranges)[0])
    params = parser.AdaptiveSpeculativeParams(2, str(tmp_path / "table.json"))
    assert parser.resolve_candidate_steps_from_config(str(tmp_path / "table.json")) == [0, 2, 5]
    for each in ranges:
        for size in range(each.low, each.high + 1):
            for _ in range(30):  # its own choice, by what is accepted, has one candidate
                assert params.on_verify_complete([0] * size, size) is None
            assert params.get_steps_for_batch(size) == each.length
