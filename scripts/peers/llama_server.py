"""llama.cpp's server, from the xllamacpp wheel, on the same weights: with a draft model and without.

Runs in the environment of that peer. Weights are the GGUF files that to_gguf.py wrote from the exported checkpoints.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp
from closed_loop import Clients, Prompt, Requests, option_parser, summary

CONTEXT = 512  # tokens per slot: prompt, output and draft fit
DRAFT_SIMPLE = 1  # the number of COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE


def parameters(target: Path, draft: Path | None, length: int, slots: int, threads: int) -> Any:
    settings = xllamacpp.CommonParams()
    settings.model.path = str(target)
    settings.n_parallel, settings.n_ctx = slots, slots * CONTEXT
    settings.n_gpu_layers = 0
    settings.verbosity = -1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    if draft is not None:
        drafting = settings.speculative.draft
        drafting.mparams.path = str(draft)
        # Always `length` tokens: p_min would cut drafts short by the draft's own confidence.
        drafting.n_max, drafting.n_min, drafting.p_min = length, 0, 0.0
        drafting.cpuparams.n_threads = drafting.cpuparams_batch.n_threads = threads
        kind = type(settings.speculative.types[0])
        settings.speculative.types = [kind(DRAFT_SIMPLE)]
    return settings


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


def main() -> None:
    parser = option_parser(__doc__, "target.gguf, draft.gguf and requests.json")
    parser.add_argument("--length", type=int, required=True, help="tokens to draft; 0: no draft model")
    options = parser.parse_args()
    requests = Requests.read(options.folder / "requests.json")
    draft = options.folder / "draft.gguf" if options.length else None
    slots = max(options.concurrency)
    server = Server(parameters(options.folder / "target.gguf", draft, options.length, slots, options.threads))
    mode = f"draft model, {options.length} tokens" if options.length else "no draft"
    for concurrency in options.concurrency:
        found = Clients(server.send, requests, concurrency).run(options.seconds)
        summary("llama.cpp server", mode, concurrency, options.threads, *found).print()


if __name__ == "__main__":
    main()
