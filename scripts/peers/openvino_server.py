"""OpenVINO GenAI's continuous batching behind the part of OpenAI's chat API that the comparison uses.

Runs in the environment of that peer. Keys and values are kept as the checkpoint's numbers; GenAI's default is 8 bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openvino_genai as genai

ROWS = 16  # requests at a time
LARGEST_NGRAM = 3  # that prompt lookup searches for
# Requests that the engine has not taken yet: body, and what becomes the answer's text and number of tokens.
WAITING: queue.Queue[tuple[dict[str, Any], Future[tuple[str, int]]]] = queue.Queue()


class Handler(BaseHTTPRequestHandler):
    """Puts a request into the queue and answers when the engine has."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer({"object": "list", "data": [{"id": "target", "object": "model"}]})

    def do_POST(self) -> None:
        done: Future[tuple[str, int]] = Future()
        WAITING.put((json.loads(self.rfile.read(int(self.headers["Content-Length"]))), done))
        text, num_tokens = done.result()
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


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


def load(options: argparse.Namespace) -> genai.ContinuousBatchingPipeline:
    numbers = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
    properties: dict[str, object] = dict(numbers)
    if options.draft:
        properties["draft_model"] = genai.draft_model(options.folder / "draft-openvino", "CPU", **numbers)
    if options.lookup:
        properties["prompt_lookup"] = True
    scheduling = genai.SchedulerConfig()
    scheduling.max_num_seqs, scheduling.max_num_batched_tokens = ROWS, 1024
    scheduling.cache_size = 1  # GiB
    return genai.ContinuousBatchingPipeline(options.folder / "target-openvino", scheduling, "CPU", properties)


def generation(body: dict[str, Any], options: argparse.Namespace, eos_id: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.eos_token_id = body["max_tokens"], eos_id  # greedy, as it is without temperature
    if length := options.draft or options.lookup:
        config.num_assistant_tokens = length
    if options.lookup:
        config.max_ngram_size = LARGEST_NGRAM
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the weights")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--draft", type=int, default=0, help="tokens that the draft model proposes")
    parser.add_argument("--lookup", type=int, default=0, help="tokens that prompt lookup proposes")
    options = parser.parse_args()
    threading.Thread(target=Server(("127.0.0.1", options.port), Handler).serve_forever, daemon=True).start()
    pipeline = load(options)
    tokenizer, names = pipeline.get_tokenizer(), itertools.count()
    running: list[tuple[genai.GenerationHandle, Future[tuple[str, int]]]] = []
    while True:
        while len(running) < ROWS and (not running or not WAITING.empty()):
            body, done = WAITING.get()
            ids = tokenizer.encode(
                tokenizer.apply_chat_template(body["messages"], True), add_special_tokens=False
            ).input_ids
            config = generation(body, options, tokenizer.get_eos_token_id())
            running.append((pipeline.add_request(next(names), ids, config), done))
        pipeline.step()
        ended = [one for one in running if one[0].get_status().name != "RUNNING"]
        running = [one for one in running if one not in ended]
        for handle, done in ended:
            tokens = [token for output in handle.read_all() for token in output.generated_ids]
            done.set_result((tokenizer.decode(tokens), len(tokens)))


if __name__ == "__main__":
    main()
