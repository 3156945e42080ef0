"""`speclen generate`: sends one prompt to a worker and streams the text."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer
from google.protobuf.json_format import MessageToDict

from speclen.cli.support.client import WORKER, client_from
from speclen.cli.support.flags import flags_from
from speclen.cli.support.output import UserError
from speclen.process.credentials import ClientSecurity
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc

MOST_TOKENS = 2**32 - 1  # limit of the protobuf field
MOST_SEED = 2**64 - 1
LONGEST_SPECULATION = 64
LONGEST_WAIT_S = 1e6


def parse_speculation(text: str) -> pb.Speculation:
    """Parse "auto", "off" or a length. Raises UserError."""
    if text == "auto":
        return pb.Speculation(mode=pb.Speculation.MODE_AUTO)
    if text == "off":
        return pb.Speculation(mode=pb.Speculation.MODE_OFF)
    if text.isdecimal() and len(text) < 9 and int(text) <= LONGEST_SPECULATION:
        return pb.Speculation(mode=pb.Speculation.MODE_FIXED, length=int(text))
    raise UserError(
        f"--speculation {text!r} is unknown: use auto, off or a number of tokens from 0 to {LONGEST_SPECULATION}"
    )


@flags_from(ClientSecurity)
def generate(
    prompt: str = typer.Argument(help="Prompt; - reads it from standard input."),
    max_tokens: int = typer.Option(128, min=1, max=MOST_TOKENS, help="Maximum number of tokens to generate."),
    temperature: float = typer.Option(0.0, min=0, max=100, help="0 is greedy."),
    top_p: float = typer.Option(
        1.0, min=0, max=1, help="Sample from the most likely tokens with this total probability."
    ),
    top_k: int = typer.Option(0, min=0, max=MOST_TOKENS, help="Sample from this many most likely tokens; 0: all."),
    seed: int | None = typer.Option(
        None,
        min=0,
        max=MOST_SEED,
        help="The same seed gives the same tokens, within the precision of the worker's dtype.",
    ),
    stop: list[str] = typer.Option([], help="Stop before this text; can be given several times."),
    n: int = typer.Option(1, min=1, max=64, help="Sequences to generate."),
    speculation: str = typer.Option("auto", help="auto, off, or a fixed number of tokens."),
    timeout_s: float = typer.Option(300.0, min=0.001, max=LONGEST_WAIT_S, help="Give up after this many seconds."),
    as_json: bool = typer.Option(False, "--json", help="Print the completions as JSON instead of text."),
    worker: str = typer.Option(WORKER, help="Address of the worker."),
    **security: Any,
) -> None:
    """Send one prompt to a worker and print what it generates.

    Example: speclen generate "def read_file(path):" --max-tokens 64
    """
    sampling = pb.SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, n=n, max_tokens=max_tokens, stop=map(utf8, stop)
    )
    if prompt == "-":
        prompt = sys.stdin.buffer.read().decode("utf-8", errors="surrogateescape")  # `utf8` refuses invalid bytes
    request = pb.GenerateRequest(
        text=utf8(prompt),
        sampling_params=sampling,
        stream=not as_json and n == 1,
        speculation=parse_speculation(speculation),
    )
    with client_from(security).calling("worker", worker) as channel:
        completions = print_stream(rpc.GenerationServiceStub(channel).Generate(request, timeout=timeout_s), as_json)
    if as_json:
        print(json.dumps(completions, indent=2))


def utf8(text: str) -> str:
    """Return the text. Raises UserError if it is not valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text is not UTF-8 (character {error.start + 1}): convert it first") from error
    return text


def print_stream(responses: Any, as_json: bool) -> list[dict[str, Any]]:
    """Print chunks to stdout and a line of statistics per sequence to stderr; return the completions."""
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
