"""A learned table in another engine's format keeps that engine's rules and holds the same lengths.

The rules are those of vLLM 0.33 (validate_and_normalize_dynamic_sd_schedule), TensorRT-LLM (validate_draft_len_schedule) and
SGLang 0.5.23 (adaptive_spec_params). `scripts/vllm_check` asks vLLM's own validator.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speclen.cli.export import WRITERS, Range, export, merged
from speclen.cli.support.output import UserError
from speclen.cli.tables import rows_of
from speclen.store.schema import Commit
from tests.support.database_rows import write_database
from tests.support.store_rows import estimate, rows, written

tables = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 8)), min_size=1, max_size=8)


def table_of(widths_and_lengths):
    """Neighbouring ranges of these widths."""
    ranges, low = [], 1
    for width, length in widths_and_lengths:
        ranges.append(Range(low, low + width - 1, length))
        low += width
    return merged(ranges)


def lengths(ranges):
    return [each.length for each in ranges for _ in range(each.low, each.high + 1)]


@given(tables)
def test_vllm_takes_what_is_written(parts):
    ranges = table_of(parts)
    config = json.loads(WRITERS["vllm"](ranges)[0])
    schedule = config["num_speculative_tokens_per_batch_size"]
    assert config["num_speculative_tokens"] >= max(1, *(length for *_, length in schedule))
    assert schedule[0][0] == 1
    assert [after[0] for after in schedule[1:]] == [high + 1 for _, high, _ in schedule[:-1]]
    assert lengths(Range(*entry) for entry in schedule) == lengths(ranges)


@given(tables)
def test_tensorrt_llm_takes_what_is_written(parts):
    ranges = table_of(parts)
    if not ranges[0].length:
        with pytest.raises(ValueError, match="drafts nothing"):
            WRITERS["tensorrt-llm"](ranges)
        return
    text, notes = WRITERS["tensorrt-llm"](ranges)
    config = json.loads(text)
    schedule = {int(key): value for key, value in config["draft_len_schedule"].items()}
    assert schedule[min(schedule)] == config["max_draft_len"]
    lows = [1, *(high + 1 for high in schedule)]
    found = lengths(Range(low, high, length) for low, (high, length) in zip(lows, schedule.items(), strict=False))
    assert found == [min(length, config["max_draft_len"]) for length in lengths(ranges)]
    assert any("longer ones are cut" in note for note in notes) == (found != lengths(ranges))


@given(tables)
def test_sglang_takes_what_is_written(parts):
    ranges = table_of(parts)
    config = json.loads(WRITERS["sglang"](ranges)[0])
    assert all(len(entry["candidate_steps"]) == 1 and low.isdigit() for low, entry in config.items())
    ends = [*(int(low) - 1 for low in list(config)[1:]), ranges[-1].high]
    found = [Range(int(low), end, *config[low]["candidate_steps"]) for low, end in zip(config, ends, strict=True)]
    assert lengths(found) == lengths(ranges)


@pytest.mark.parametrize("table_format", ["json", *WRITERS])
def test_export_writes_what_was_learned(tmp_path, capsys, table_format):
    database = write_database(tmp_path / "test.db")
    if table_format == "tensorrt-llm":  # which cannot say what this database says
        with pytest.raises(UserError, match="drafts nothing"):
            export(None, database, context="", table_format=table_format)
        return
    export(None, database, context="", table_format=table_format)
    text = capsys.readouterr().out
    if table_format == "json":
        assert [tuple(row.values()) for row in json.loads(text)] == rows(database, "SELECT * FROM learned_table")
    export(tmp_path / "table", database, context="", table_format=table_format)
    assert (tmp_path / "table").read_text() == text


def test_where_n_grams_are_in_use_the_best_length_without_is_written_with_a_note(tmp_path, capsys):
    database = write_database(tmp_path / "test.db")
    used = estimate(0, ngram=True, expected_tokens=3.2, is_best=True)
    changed = [used, estimate(2, is_best=False), estimate(0, 1, 2, ngram=True)]
    written(database, Commit(arm_estimates=changed))
    export(None, database, context="", table_format="vllm")
    printed = capsys.readouterr()
    assert json.loads(printed.out)["num_speculative_tokens_per_batch_size"] == [[1, 2, 0], [3, 4, 2]]
    assert "vllm: the best lengths in t + d on cpu:test" in printed.err
    assert "arms with n-grams are in use at batch sizes 3-4" in " ".join(printed.err.split())


def test_ranges_are_those_that_tables_shows(tmp_path, capsys):
    """Story: where two lengths were equal, every batch size at which the other was ahead made a range of its own."""
    database, uncertain = write_database(tmp_path / "test.db"), {"ms_per_token_low": 7.0, "ms_per_token_high": 14.0}
    changed = [estimate(0, 1, 2, is_best=False), estimate(2, 1, 2, is_best=True)]
    for size in range(3, 11):
        last, plain_is_ahead = max(4, size), size % 2 == 0 and size > 4
        changed += [
            estimate(0, size, last, step_s=0.0101, expected_tokens=1.0, is_best=plain_is_ahead, **uncertain),
            estimate(2, size, last, is_best=not plain_is_ahead, **uncertain),
        ]
    del changed[4:6]  # 4 is in the range of 3
    written(database, Commit(arm_estimates=changed))
    shown = [
        (row["batch_min"], row["batch_max"], row["arm"], row["equal_arms"]) for row in rows_of(database, "choices", "")
    ]
    assert shown == [(1, 10, "draft 2", "plain")]
    export(None, database, context="", table_format="vllm")
    ranges = json.loads(capsys.readouterr().out)["num_speculative_tokens_per_batch_size"]
    assert [tuple(each) for each in ranges] == [(1, 10, 2)]


def test_an_export_that_is_not_possible_is_refused(tmp_path):
    database = write_database(tmp_path / "test.db")
    with pytest.raises(UserError, match="use json, vllm"):
        export(None, database, context="", table_format="vlm")
    with pytest.raises(UserError, match="no such"):
        export(None, database, context="no such", table_format="vllm")
    with pytest.raises(UserError, match="is a database and is not overwritten"):
        export(database, database, context="", table_format="json")
