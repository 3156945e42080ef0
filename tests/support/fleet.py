"""A controller and workers as processes."""

from __future__ import annotations

from pathlib import Path

import grpc

from speclen.cli.support.processes import Child
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc
from tests.support.addresses import free_address

PROMPT = "def add(a, b):\n    return"


class Fleet:
    """Processes of one test, each stopped at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[Child] = []
        self.controller_address = free_address()

    @property
    def database(self) -> Path:
        return self.folder / "speclen.db"

    def start(self, name: str, arguments: list[str], address: str) -> Child:
        child = Child(name, arguments, address, self.folder / f"{name}-{len(self.children)}.log")
        self.children.append(child)
        child.start()
        return child

    def controller(self) -> Child:
        arguments = ["controller", "--listen", self.controller_address, "--data-dir", str(self.folder)]
        return self.start("controller", arguments, self.controller_address)

    def worker(self, target: str, draft: str, *options: str) -> Child:
        address = free_address()
        arguments = ["worker", "--listen", address, "--controller", self.controller_address, "--device", "cpu"]
        return self.start("worker", [*arguments, "--target", target, "--draft", draft, *options], address)


def generate(address: str, **fields) -> list[pb.GenerateResponse]:
    with grpc.insecure_channel(address) as channel:
        request = pb.GenerateRequest(text=PROMPT, **fields)
        return list(rpc.GenerationServiceStub(channel).Generate(request, timeout=60))
