"""speclen on the same requests, over gRPC as any client: with the learned length, and without speculation.

Runs in the project's environment. Controller and worker are started for the purpose.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grpc
import typer
from closed_loop import Clients, Prompt, Requests, summary

from speclen.bench.serving.deployment import WorkerSettings
from speclen.bench.serving.load import make_request
from speclen.bench.serving.policies import make_policy
from speclen.bench.serving.warm import WarmWorker
from speclen.v1 import generation_pb2_grpc as rpc


class Client:
    """send() asks for one request and waits for all of it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = rpc.GenerationServiceStub(channel)

    def send(self, prompt: Prompt, num_tokens: int) -> int:
        request = make_request(prompt, num_tokens)
        request.stream = False
        *_, last = self._stub.Generate(request, timeout=300)
        return len(last.complete.output_ids)


def main(
    folder: Path,
    threads: int = typer.Option(..., help="CPU threads of the worker."),
    policy: str = "adaptive",
    profile: Path | None = typer.Option(None, help="Offline profile to start from, for adaptive or profile."),
    concurrency: list[int] = typer.Option([1, 4, 16]),
    seconds: float = 10.0,
    learn_s: float = typer.Option(10.0, help="Seconds at each concurrency before it is measured, for adaptive."),
) -> None:
    """Measure closed loops, one concurrency after the other, and print a JSON line each."""
    requests = Requests.read(folder / "requests.json")
    settings = WorkerSettings(
        str(folder / "target"),
        str(folder / "draft"),
        "cpu",
        max_batch_size=max(concurrency),
        threads=threads,
        max_cached_tokens=0,
    )
    with WarmWorker(settings, profile) as worker, grpc.insecure_channel(worker.address) as channel:
        client = Client(channel)
        worker.open(make_policy(policy, settings.max_batch_size, settings.max_length, profile))
        worker.use(policy)
        for number in concurrency:
            if policy == "adaptive":
                Clients(client.send, requests, number).run(learn_s)
            found = Clients(client.send, requests, number).run(seconds)
            summary("speclen", policy, number, threads, *found).print()
    print(f"speclen {policy} done", file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
