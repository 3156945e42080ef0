"""The part of OpenAI's chat API that the comparison uses, around an engine without a server. Standard library only."""

from __future__ import annotations

import argparse
import json
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROWS = 16  # requests at a time


@dataclass
class Asked:
    """A request. done: text of the answer, and its number of tokens."""

    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float
    seed: int
    done: Future[tuple[str, int]] = field(default_factory=Future)


class Handler(BaseHTTPRequestHandler):
    """Puts a request into the server's queue and answers when the engine has."""

    protocol_version = "HTTP/1.1"
    server: ChatServer

    def do_GET(self) -> None:
        self.answer({"object": "list", "data": [{"id": "target", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = Asked(body["messages"], body["max_tokens"], body["temperature"], body.get("seed", 0))
        self.server.waiting.put(asked)
        text, num_tokens = asked.done.result()
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": num_tokens, "total_tokens": num_tokens}
        common = {"id": "1", "object": "chat.completion", "created": 0, "model": "target"}
        self.answer({**common, "choices": [choice], "usage": usage})

    def answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:
        """Print nothing."""


class ChatServer(ThreadingHTTPServer):
    """waiting: requests that the engine has not taken yet."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.waiting: queue.Queue[Asked] = queue.Queue()


def take(waiting: queue.Queue[Asked], most: int, wait: bool) -> list[Asked]:
    """Requests that wait, `most` at most. wait: until there is one."""
    taken = [waiting.get()] if wait and most else []
    while len(taken) < most:
        try:
            taken.append(waiting.get_nowait())
        except queue.Empty:
            break
    return taken


def serve(engine: Callable[[argparse.Namespace, queue.Queue[Asked]], None]) -> None:
    """Serve what the command line names. engine(options, waiting) runs in this thread, for ever."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="of the weights")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--draft", type=int, default=0, help="tokens that the draft model proposes")
    parser.add_argument("--lookup", type=int, default=0, help="tokens that prompt lookup proposes")
    options = parser.parse_args()
    server = ChatServer(options.port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    engine(options, server.waiting)
