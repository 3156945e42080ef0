"""Verbs, gRPC methods and SQLite views exist under the names that users and programs rely on."""

from __future__ import annotations

import json

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from typer.testing import CliRunner

from speclen.cli.app import app
from tests.contract import protocol
from tests.contract.protocol import Control, Step
from tests.contract.servers import answers_serving, as_json, speclen

VERBS = """up, controller, worker, generate, top, tables, explain, replay, export, doctor, dashboard, backup,
    profile run, profile show, profile plot, profile export, profile import,
    bench serve, bench step, bench policy, bench controller, bench fleet"""
# Method: (requests are a stream, responses are a stream).
CONTROL = {
    "RegisterWorker": (False, False),
    "ReportStep": (False, False),
    "StreamReports": (True, True),
    "GetLearnedTable": (False, False),
    "ImportProfile": (False, False),
}
GENERATION = {
    "Generate": (False, True),
    "Abort": (False, False),
    "GetModelInfo": (False, False),
    "GetServerInfo": (False, False),
}
LEARNED_TABLE = """context, batch_bucket, batch_min, batch_max, arm, speculation_length, ngram, expected_tokens,
    step_ms, ms_per_token, tokens_per_s, ms_per_token_low, ms_per_token_high, num_steps, source, is_best, updated_at"""


@pytest.mark.parametrize("verb", [verb.strip() for verb in VERBS.split(",")])
def test_a_verb_explains_itself_with_an_example(verb):
    words = verb.split()
    said = CliRunner().invoke(app, [*words, "--help"]).output
    assert f"Example: speclen {words[0]}" in " ".join(said.split())


def methods_of(channel: grpc.Channel, service: str) -> dict[str, tuple[bool, bool]]:
    """Methods of a service, by reflection."""
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    methods = pool.FindServiceByName(f"speclen.v1.{service}").methods
    return {method.name: (method.client_streaming, method.server_streaming) for method in methods}


def test_a_controller_has_the_methods_of_the_contract(controller):
    assert answers_serving(controller.address)
    assert CONTROL.items() <= methods_of(controller.channel, "ControlService").items()


def test_a_worker_has_the_methods_of_the_contract(fleet):
    assert GENERATION.items() <= methods_of(fleet.channel, "GenerationService").items()


def test_the_learned_table_needs_no_join(learned):
    columns = LEARNED_TABLE.replace("\n", " ")
    cells = protocol.rows(learned, f"SELECT {columns} FROM learned_table WHERE context LIKE 'target-learned%'")
    names = [name.strip() for name in columns.split(",")]
    played = [row for row in (dict(zip(names, cell, strict=True)) for cell in cells) if row["num_steps"]]
    assert played
    for row in played:
        assert row["source"] in ("online", "both")
        assert row["ms_per_token"] == pytest.approx(row["step_ms"] / row["expected_tokens"])
        assert row["tokens_per_s"] == pytest.approx(1000.0 / row["ms_per_token"])
        assert row["ms_per_token_low"] <= row["ms_per_token"] <= row["ms_per_token_high"]
        assert row["batch_min"] <= row["batch_max"]


@pytest.mark.parametrize("view", ["learned_table", "choices", "current_choice", "decision_history", "worker_health"])
def test_a_view_has_rows(learned, view):
    assert protocol.rows(learned, f"SELECT * FROM {view} LIMIT 1")


def test_every_bucket_has_one_best_row(learned):
    best = protocol.rows(learned, "SELECT sum(is_best) FROM learned_table GROUP BY context, batch_min")
    assert set(best) == {(1,)}


def test_verbs_read_a_database_in_use(learned):
    cells = as_json("tables", "--db", str(learned), "--json")
    assert len(cells) == protocol.rows(learned, "SELECT count(*) FROM choices")[0][0]
    explained = as_json("explain", "--db", str(learned), "--batch", "4", "--context", "target-learned", "--json")
    assert explained["words"]
    assert json.loads(speclen("export", "--db", str(learned)))
    assert as_json("doctor", "--db", str(learned), "--json") is not None


def test_what_cannot_be_done_is_one_sentence_and_code_2():
    speclen("tables", "--db", "/no/such.db", exit_code=2)
    speclen("worker", "--policy", "greedy", exit_code=2)
    speclen("tables", "--no-such-flag", exit_code=2)


def test_the_simplest_client_reports_a_step_and_gets_a_length(controller):
    control = Control(controller.channel, "simplest", "simplest")
    assert set(control.register().choices) == set(range(1, protocol.MAX_BATCH_SIZE + 1))
    step = Step(4, 2, 0.02, (1, 2, 1))
    for seq in (1, 2, 2, 1, 5):  # repeated and missing ones are no error
        length, applied_seq = control.report_step(seq, step)
        assert 0 <= length <= protocol.MAX_LENGTH
        assert applied_seq == max(2, seq) if seq > 1 else applied_seq in (1, 2)
