"""The openai client, a crowd, schemathesis, aiperf and guidellm against a worker with the bundled pair.

Each program gets an environment of its own in .clients, made once; one that cannot be installed is said to be so.
Arguments: the programs that are to run, instead of all.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path

import openai

from speclen.bench.clients.crowd import NUM_DISCONNECTS, NUM_STREAMS, Crowd, disconnects, streams
from speclen.bench.clients.openai_cases import CASES, MODEL, STRUCTURED, Case
from speclen.bench.clients.programs import KEY, PROGRAMS, URL, NotInstalledError
from speclen.bench.findings import Report
from speclen.cli.support.processes import Child

LISTEN = "127.0.0.1:7098"
TEMPLATE = "{% for m in messages %}# {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}def {% endif %}"
# Of the worker. Schemathesis asks for 64 sequences without a limit again and again: short ones, then.
OPTIONS = {"crowd": {"max_batch_size": 16}, "schemathesis": {"max_kv_tokens": 256, "max_length": 2}}
Checks = Iterator[tuple[str, Callable[[], str]]]  # by what they check; they return a remark, or raise


def main() -> None:
    names = sys.argv[1:] or ["openai", "crowd", *PROGRAMS]
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for name in names for row in check(name, Path(folder))]
    Report().table(("Program", "What", "", "s", "Remark"), rows)
    sys.exit(any("FAILED" in row for row in rows))


def check(name: str, folder: Path) -> list[tuple[str, ...]]:
    """Rows of a program, with a worker of its own."""
    print(f"{name} …", file=sys.stderr)
    program, checks = checks_of(name)
    worker = make_worker(folder, OPTIONS.get(name, {}))
    worker.start()
    try:
        worker.wait_until_serving(120)
        return [(program, what, *tried(act)) for what, act in checks]
    finally:
        worker.stop(timeout_s=20)


def checks_of(name: str) -> tuple[str, Checks]:
    """The program with its version, and what is checked with it."""
    if name == "openai":
        return f"openai {version('openai')}", openai_checks()
    if name == "crowd":
        return "plain sockets", crowd_checks()
    program = PROGRAMS[name]
    checks = ((what, partial(program.run, arguments)) for what, arguments in program.runs.items())
    return program.packages[0].replace("==", " "), checks


def openai_checks() -> Checks:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)

    def act(case: Case) -> str:
        if not case(client):
            raise ValueError("the answer is not what was asked for")
        return ""

    return ((what, partial(act, case)) for what, case in (CASES | STRUCTURED).items())


def crowd_checks() -> Checks:
    """In this order: the disconnects must not have left anything that keeps others out."""
    crowd = Crowd(URL.removeprefix("http://"), KEY)
    yield f"{NUM_STREAMS:,} streams at once on 16 rows", lambda: asyncio.run(streams(crowd))
    yield f"{NUM_DISCONNECTS:,} clients that go away", lambda: asyncio.run(disconnects(crowd))
    yield f"{NUM_STREAMS:,} streams again", lambda: asyncio.run(streams(crowd))


def tried(act: Callable[[], str]) -> tuple[str, str, str]:
    """Whether it passed, seconds, and a remark."""
    started = time.monotonic()
    try:
        mark, remark = "passed", act()
    except NotInstalledError as error:
        mark, remark = "not run", f"cannot be installed: {error}"
    except Exception as error:  # of any kind: told in its row, and in the exit code
        mark, remark = "FAILED", f"{type(error).__name__}: {error}"
    return mark, f"{time.monotonic() - started:.1f}", remark


def make_worker(folder: Path, settings: dict[str, int]) -> Child:
    key, template = folder / "key", folder / "chat.jinja"
    key.write_text(KEY)
    template.write_text(TEMPLATE)
    options = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    options += ["--controller", "", "--served-model-name", MODEL, "--chat-template", str(template)]
    options += ["--listen", LISTEN, "--http-listen", URL.removeprefix("http://"), "--api-key-file", str(key)]
    return Child("worker", ["worker", *options], LISTEN, folder / "worker.log")


if __name__ == "__main__":
    main()
