"""A learned table in another engine's format keeps that engine's rules, and is the same when read back.

The rules are those of vLLM 0.32 (validate_and_normalize_dynamic_sd_schedule), TensorRT-LLM (validate_draft_len_schedule) and
SGLang (speculative_adaptive_config); `scripts/vllm_check` asks vLLM's own validator.
"""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speclen.cli.support.errors import UserError
from speclen.cli.transfer.chosen import differences, table_from
from speclen.cli.transfer.export import export_state
from speclen.cli.transfer.formats import READERS, WRITERS, Range, length_at, merged, read_table
from speclen.store.database import Store
from speclen.store.records import Commit
from tests.support.database_rows import write_database
from tests.support.store_rows import estimate, store_now

tables = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 8)), min_size=1, max_size=8)


def table_of(widths_and_lengths):
    """Neighbouring ranges of these widths."""
    ranges, low = [], 1
    for width, length in widths_and_lengths:
        ranges.append(Range(low, low + width - 1, length))
        low += width
    return merged(ranges)


def lengths(ranges, end):
    return [length_at(ranges, size) for size in range(1, end + 1)]


@given(tables)
def test_vllm_takes_what_is_written_and_reads_the_same(parts):
    ranges = table_of(parts)
    config = json.loads(WRITERS["vllm"](ranges).text)
    schedule = config["num_speculative_tokens_per_batch_size"]
    assert config["num_speculative_tokens"] >= 1
    assert schedule[0][0] == 1
    previous = 0
    for low, high, length in schedule:
        assert previous < low <= high
        assert 0 <= length <= config["num_speculative_tokens"]
        previous = high
    assert lengths(read_table(json.dumps(config), "vllm"), previous) == lengths(ranges, previous)


@given(tables)
def test_tensorrt_llm_takes_what_is_written(parts):
    ranges = table_of(parts)
    if not ranges[0].length:
        with pytest.raises(ValueError, match="drafts none"):
            WRITERS["tensorrt-llm"](ranges)
        return
    written = WRITERS["tensorrt-llm"](ranges)
    config = json.loads(written.text)
    schedule = {int(key): value for key, value in config["draft_len_schedule"].items()}
    assert min(schedule) >= 1
    assert schedule[min(schedule)] == config["max_draft_len"]
    assert all(0 <= value <= config["max_draft_len"] for value in schedule.values())
    end = ranges[-1].high
    wanted = [min(length, config["max_draft_len"]) for length in lengths(ranges, end)]
    assert lengths(read_table(written.text, "tensorrt-llm"), end) == wanted
    assert any("longer ones are cut" in note for note in written.notes) == (wanted != lengths(ranges, end))


@given(tables)
def test_sglang_takes_what_is_written(parts):
    ranges = table_of(parts)
    written = WRITERS["sglang"](ranges)
    config = json.loads(written.text)
    assert "1" in config
    assert all(len(entry["candidate_steps"]) == 1 and entry["candidate_steps"][0] >= 1 for entry in config.values())
    end = ranges[-1].high
    assert lengths(read_table(written.text, "sglang"), end) == [max(1, length) for length in lengths(ranges, end)]


def test_llama_cpp_has_one_length_and_says_so():
    written = WRITERS["llama.cpp"](table_of([(1, 5), (3, 2)]))
    assert written.text == "--spec-draft-n-max 5"
    assert "batch size 1" in written.notes[0]
    assert lengths(read_table(written.text, "llama.cpp"), 9) == [5] * 9


def test_a_gap_in_vllms_table_goes_on_with_the_length_before_it():
    assert lengths(read_table("[[1, 4, 3], [9, 12, 1]]", "vllm"), 14) == [3] * 8 + [1] * 6


@pytest.mark.parametrize(
    ("table_format", "text"),
    [
        ("vllm", "nonsense"),
        ("vllm", "[]"),
        ("vllm", "[[2, 4, 3]]"),
        ("vllm", "[[1, 4, 3], [3, 6, 2]]"),
        ("vllm", "[[1, 4]]"),
        ("vllm", '{"num_speculative_tokens": 3}'),
        ("vllm", "[[1, 4, 99]]"),
        ("vllm", "[[1, 99999, 3]]"),
        ("vllm", "7"),
        ("tensorrt-llm", '{"0": 3}'),
        ("tensorrt-llm", "[4]"),
        ("sglang", '{"2": {"candidate_steps": [3]}}'),
        ("sglang", '{"1": {}}'),
        ("sglang", '{"1": {"candidate_steps": []}}'),
        ("llama.cpp", "--threads 4"),
    ],
)
def test_what_is_no_table_is_one_sentence(tmp_path, table_format, text):
    path = tmp_path / "table"
    path.write_text(text)
    with pytest.raises(UserError, match=str(path)):
        table_from(path, table_format)


@pytest.mark.parametrize("table_format", WRITERS)
def test_export_writes_the_lengths_in_use(tmp_path, capsys, table_format):
    database = write_database(tmp_path / "test.db")
    if table_format == "tensorrt-llm":  # which cannot say what this database says
        with pytest.raises(UserError, match="drafts none"):
            export_state(None, database, context="", table_format=table_format)
        return
    export_state(None, database, context="", table_format=table_format)
    text = capsys.readouterr().out
    ranges = read_table(text, table_format)
    path = tmp_path / "table"
    export_state(path, database, context="", table_format=table_format)
    assert path.read_text() == text
    name, found = differences(ranges, database, "")
    assert name
    if table_format == "vllm":
        assert all(each.table_length == each.length_in_use for each in found)
        assert all(each.table_ms_per_token == each.ms_per_token for each in found)


def test_where_n_grams_are_in_use_the_best_length_without_is_written_with_a_note(tmp_path, capsys):
    database = write_database(tmp_path / "test.db")
    used = estimate(0, ngram=True, expected_tokens=3.2, is_best=True)
    store = Store.open(database)
    assert (
        store_now(store, Commit(arm_estimates=[used, estimate(2, is_best=False), estimate(0, 1, 2, ngram=True)]))
        is None
    )
    store.close()
    export_state(None, database, context="", table_format="vllm")
    printed = capsys.readouterr()
    assert read_table(printed.out, "vllm") == [Range(1, 2, 0), Range(3, 4, 2)]
    assert "vllm: the best lengths in t + d on cpu:test" in printed.err
    assert "arms with n-grams are in use at batch sizes 3-4" in " ".join(printed.err.split())


def test_a_format_or_a_context_that_is_not_there_is_told(tmp_path):
    database = write_database(tmp_path / "test.db")
    with pytest.raises(UserError, match="use json, vllm"):
        export_state(None, database, context="", table_format="vlm")
    with pytest.raises(UserError, match="no such"):
        export_state(None, database, context="no such", table_format="vllm")


def test_a_table_is_compared_without_loading_a_model(tmp_path):
    database = write_database(tmp_path / "test.db")
    path = tmp_path / "table.json"
    path.write_text("[[1, 32, 1]]")
    command = [sys.executable, "-m", "speclen.cli.app", "profile", "import", str(path)]
    command += ["--format", "vllm", "--db", str(database), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(bucket["table_length"] == 1 for bucket in json.loads(done.stdout)["buckets"])


def test_every_format_is_read_and_written():
    assert READERS.keys() == WRITERS.keys()
