"""`speclen generate`: one prompt to a worker, text as it comes."""

from __future__ import annotations

import json
import sys
from typing import Any

import grpc
import typer
from google.protobuf.json_format import MessageToDict

from speclen.console.errors import UserError
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc


def parse_speculation(text: str) -> pb.Speculation:
    """ "auto", "off" or a length. Raises UserError for anything else."""
    if text == "auto":
        return pb.Speculation(mode=pb.Speculation.MODE_AUTO)
    if text == "off":
        return pb.Speculation(mode=pb.Speculation.MODE_OFF)
    if text.isdecimal():
        return pb.Speculation(mode=pb.Speculation.MODE_FIXED, length=int(text))
    raise UserError(f"--speculation {text!r} is unknown: use auto, off or a number of tokens")


def generate(
    prompt: str = typer.Argument(help="The prompt; - reads it from standard input."),
    worker: str = typer.Option("127.0.0.1:7080", help="Address of the worker."),
    max_tokens: int = typer.Option(128, min=1, help="Tokens to generate at most."),
    temperature: float = typer.Option(0.0, help="0 is greedy."),
    top_p: float = typer.Option(1.0, help="Smallest set of tokens with this probability."),
    top_k: int = typer.Option(0, help="The k most likely tokens; 0: all."),
    seed: int | None = typer.Option(None, help="Same seed, same tokens."),
    stop: list[str] = typer.Option([], help="Stop before this text; may be given several times."),
    n: int = typer.Option(1, min=1, max=64, help="Sequences to generate."),
    speculation: str = typer.Option("auto", help="auto, off, or a fixed number of tokens."),
    timeout_s: float = typer.Option(300.0, help="Give up after this many seconds."),
    as_json: bool = typer.Option(False, "--json", help="Print the completions as JSON instead of text."),
) -> None:
    """Send one prompt to a worker and print what it generates.

    Example: speclen generate "def fibonacci(n):" --max-tokens 64
    """
    sampling = pb.SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop, n=n, max_tokens=max_tokens
    )
    request = pb.GenerateRequest(
        text=sys.stdin.read() if prompt == "-" else prompt,
        sampling_params=sampling,
        stream=not as_json and n == 1,
        speculation=parse_speculation(speculation),
    )
    with grpc.insecure_channel(worker) as channel:
        try:
            completions = print_stream(rpc.GenerationServiceStub(channel).Generate(request, timeout=timeout_s), as_json)
        except grpc.RpcError as error:
            raise UserError(explain(error, worker)) from error
    if as_json:
        print(json.dumps(completions, indent=2))


def print_stream(responses: Any, as_json: bool) -> list[dict[str, Any]]:
    """Prints chunks to stdout and a line of statistics per sequence to stderr; returns the completions."""
    completions, streamed = [], False
    for response in responses:
        if response.HasField("chunk"):
            sys.stdout.write(response.chunk.text)
            sys.stdout.flush()
            streamed = True
            continue
        complete = response.complete
        completions.append(
            MessageToDict(complete, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        )
        if not as_json:
            print("" if streamed else complete.text)
            print(statistics(complete), file=sys.stderr)
    return completions


def statistics(complete: pb.GenerateComplete) -> str:
    stats, usage = complete.speculation, complete.usage
    line = f"[{usage.completion_tokens} tokens in {stats.num_steps} steps"
    if stats.num_draft_tokens:
        line += f", {stats.num_accepted_tokens} of {stats.num_draft_tokens} drafted accepted"
    return f"{line}; finished: {pb.FinishReason.Name(complete.finish_reason).removeprefix('FINISH_REASON_').lower()}]"


def explain(error: grpc.RpcError, worker: str) -> str:
    assert isinstance(error, grpc.Call)
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return f"no worker answers at {worker}: start one with `speclen up`, or name its address with --worker"
    return f"the worker at {worker} answered {error.code().name}: {error.details()}"
