"""Reflection lists the gRPC methods of the contract, as tools like grpcurl need them."""

import asyncio

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.support.control_fakes import served
from tests.support.http_worker import http_worker

UNARY, STREAM = False, True
# Method: requests, responses.
CONTROL = dict.fromkeys(("RegisterWorker", "ReportStep", "GetLearnedTable", "ImportProfile"), (UNARY, UNARY))
CONTROL["StreamReports"] = (STREAM, STREAM)
GENERATION = dict.fromkeys(("Abort", "GetModelInfo", "GetServerInfo"), (UNARY, UNARY))
GENERATION["Generate"] = (UNARY, STREAM)


def methods_of(address, service):
    with grpc.insecure_channel(address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        methods = pool.FindServiceByName(f"speclen.v1.{service}").methods
        return {method.name: (method.client_streaming, method.server_streaming) for method in methods}


async def test_a_controller_has_the_methods_of_the_contract(tmp_path):
    async with served(tmp_path) as at:
        assert CONTROL.items() <= (await asyncio.to_thread(methods_of, at.address, "ControlService")).items()


def test_a_worker_has_the_methods_of_the_contract():
    with http_worker() as worker:
        assert GENERATION.items() <= methods_of(worker.grpc, "GenerationService").items()
