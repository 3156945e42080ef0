"""gRPC methods and SQLite views exist under the names that users and programs rely on."""

import json

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from speclen.v1 import control_pb2 as pb
from tests.contract import protocol
from tests.contract.protocol import Control
from tests.contract.servers import answers_serving, as_json, speclen

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


@pytest.mark.parametrize("view", ["learned_table", "choices", "current_choice", "decision_history", "worker_health"])
def test_a_view_has_rows(learned, view):
    assert protocol.rows(learned, f"SELECT * FROM {view} LIMIT 1")


def test_every_batch_range_has_one_best_arm(learned):
    best = protocol.rows(learned, "SELECT sum(is_best) FROM learned_table GROUP BY context, batch_min")
    assert set(best) == {(1,)}


def test_verbs_read_a_database_that_a_controller_is_using(learned):
    cells = as_json("tables", "--db", str(learned), "--json")
    assert len(cells) == protocol.rows(learned, "SELECT count(*) FROM choices")[0][0]
    explained = as_json("explain", "--db", str(learned), "--batch", "4", "--context", "target-learned", "--json")
    assert explained["words"]
    assert json.loads(speclen("export", "--db", str(learned)))
    assert as_json("doctor", "--db", str(learned), "--json") is not None


def test_the_simplest_client_reports_a_step_and_receives_a_length(controller):
    control = Control(controller.channel, "simplest", "simplest")
    assert set(control.register()) == set(range(1, protocol.MAX_BATCH_SIZE + 1))
    for seq, applied in ((1, 1), (2, 2), (2, 2), (1, 2), (5, 5)):  # repeated and missing ones are no error
        report = pb.StepReport(
            seq=seq, batch_size=4, speculation_length=2, latency_s=0.02, accepted_histogram=(1, 2, 1)
        )
        answer = control.stub.ReportStep(pb.ReportStepRequest(worker=control.identity, report=report))
        assert 0 <= answer.speculation_length <= protocol.MAX_LENGTH
        assert answer.applied_seq == applied
