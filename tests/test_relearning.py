"""The law: a state of another version costs nobody what was learned; it is taught again by the reports that are kept."""

import json

import pytest
from control_fakes import CONTEXT, Served, identity, registration, report, run, served

from speclen.store.connection import connect_reader, connect_writer
from speclen.store.files import damage_path
from speclen.v1 import control_pb2 as pb

OLD_STATE = json.dumps({"policy": "adaptive", "buckets": [1, 2, 4, 8, 16, 32], "model": {}, "lengths": [2] * 6})


async def life(tmp_path, first: int, last: int) -> pb.LearnedTable:
    """A controller that a worker sends these reports, and what it knows in the end."""
    async with served(tmp_path, commit_interval_s=0.05) as at:
        await at.stub.RegisterWorker(registration())
        for seq in range(first, last + 1):
            length = seq % 3
            reported = report(
                seq,
                speculation_length=length,
                accepted_histogram=[1] * length + [4 - length],
                latency_s=0.02 + 0.003 * length + 0.0001 * (seq % 5),
                class_histograms=[
                    pb.ClassHistogram(request_class=1, accepted_histogram=[0] * length + [2]),
                    pb.ClassHistogram(request_class=3, accepted_histogram=[1] * length + [2 - length]),
                ],
            )
            await at.stub.ReportStep(pb.ReportStepRequest(worker=identity(), report=reported))
        return (await at.stub.GetLearnedTable(pb.GetLearnedTableRequest(context=CONTEXT))).tables[0]


def change(tmp_path, *statements: str) -> None:
    """What is stored, while no controller runs."""
    connection = connect_writer(tmp_path / "test.db")
    for statement in statements:
        connection.execute(statement)
    connection.close()


async def table_of(at: Served) -> pb.LearnedTable:
    """What a controller knows when a worker comes."""
    await at.stub.RegisterWorker(registration())
    return (await at.stub.GetLearnedTable(pb.GetLearnedTableRequest(context=CONTEXT))).tables[0]


def test_a_state_of_another_version_is_learned_again_at_start(tmp_path):
    known: list[pb.LearnedTable] = []

    async def story():
        known.append(await life(tmp_path, 1, 60))
        change(
            tmp_path,
            f"UPDATE learned_states SET state = '{OLD_STATE}'",
            "UPDATE latency_cells SET batch_min = batch_min, batch_max = 32 WHERE batch_min = 17",
            "DELETE FROM latency_cells WHERE batch_min > 17",
        )
        known.append(await life(tmp_path, 61, 60))

    run(story)
    before, after = known
    assert sum(row.num_steps for row in after.rows) == 60
    assert [row.observed_step_ms for row in after.rows] == [row.observed_step_ms for row in before.rows]
    for old, new in zip(before.rows, after.rows, strict=True):
        assert new.step_ms == pytest.approx(old.step_ms, rel=1e-6)
        assert new.expected_tokens == pytest.approx(old.expected_tokens, rel=1e-6)
    assert after.decision_version >= before.decision_version
    connection = connect_reader(tmp_path / "test.db")
    kinds = [row[0] for row in connection.execute("SELECT kind FROM store_events")]
    assert kinds == ["state_set_aside"] * 2
    cells = connection.execute("SELECT count(*), max(batch_max) FROM latency_cells WHERE batch_min = 17").fetchone()
    assert tuple(cells) == (5, 17), "what was stored of buckets that are no more is gone"
    connection.close()


def zero_the_oldest_reports(path):
    """The first leaf of the table, by the first cell of its root: an interior page (5), whose cells begin with a child."""
    connection = connect_reader(path)
    root = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'step_reports'").fetchone()[0]
    connection.close()
    content = bytearray(path.read_bytes())
    start = (root - 1) * 4096
    assert content[start] == 5, "more than one page of reports"
    cell = start + int.from_bytes(content[start + 12 : start + 14], "big")
    leaf = int.from_bytes(content[cell : cell + 4], "big")
    content[(leaf - 1) * 4096 : leaf * 4096] = bytes(4096)
    path.write_bytes(content)


def test_reports_on_a_damaged_page_leave_the_newer_ones_to_learn_from(tmp_path, monkeypatch):
    """A controller whose older reports could not be read ended at every start with a traceback, for ever."""

    async def story():
        await life(tmp_path, 1, 300)
        change(tmp_path, "UPDATE learned_states SET state = '[]'", "PRAGMA wal_checkpoint(TRUNCATE)")
        zero_the_oldest_reports(tmp_path / "test.db")
        # A small file is read whole before it is used; of one of gigabytes the old reports are not.
        monkeypatch.setattr("speclen.store.schema.opening._check_content", lambda *_: None)
        monkeypatch.setattr("speclen.store.queries._last_group_id", lambda connection: 300)
        with pytest.raises(OSError, match="is damaged"):  # its commits meet the damage, too
            async with served(tmp_path, commit_interval_s=0.05) as at:
                assert 100 < sum(row.num_steps for row in (await table_of(at)).rows) < 300
        monkeypatch.undo()
        # That would happen at every start, were the next one not to read all.
        assert damage_path(tmp_path / "test.db").exists()
        async with served(tmp_path, move_corrupt_aside=True) as at:
            assert not (await table_of(at)).rows
        assert not damage_path(tmp_path / "test.db").exists()

    run(story)


def test_reports_that_are_not_kept_any_more_leave_a_new_context(tmp_path):
    async def story():
        await life(tmp_path, 1, 20)
        change(tmp_path, "UPDATE learned_states SET state = '[]'", "DELETE FROM step_reports")
        assert not (await life(tmp_path, 21, 20)).rows
        assert (await life(tmp_path, 21, 40)).rows

    run(story)


def test_the_kept_reports_say_which_class_accepted_what(tmp_path):
    run(lambda: life(tmp_path, 1, 4))
    connection = connect_reader(tmp_path / "test.db")
    texts = [row[0] for row in connection.execute("SELECT class_histograms FROM step_reports ORDER BY seq LIMIT 2")]
    connection.close()
    assert texts == ['{"greedy":[0,2],"hot":[1,1]}', '{"greedy":[0,0,2],"hot":[1,1,0]}']


def test_a_plan_that_is_stored_as_in_use_and_is_not_goes_with_the_first_commit(tmp_path):
    async def story():
        await life(tmp_path, 1, 20)
        plan = (1, 1, 8, 0, "copy>=3 up to 8", 0, 0.01, 2.0, 4.0, 6.0, 1, 1.0)
        change(tmp_path, f"INSERT INTO plan_estimates VALUES {plan}")
        await life(tmp_path, 21, 21)

    run(story)
    connection = connect_reader(tmp_path / "test.db")
    assert connection.execute("SELECT count(*) FROM plan_estimates").fetchone()[0] == 0
    assert connection.execute("SELECT count(*) FROM current_choice").fetchone()[0] > 0
    connection.close()
