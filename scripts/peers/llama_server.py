"""llama.cpp's server from the xllamacpp wheel. Runs in the environment of that peer."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

import xllamacpp

ROWS = 16  # requests at a time
CONTEXT = 1024  # tokens per slot: prompt, output and draft fit
LARGEST_NGRAM = 3  # tokens that n-gram lookup compares; its default of 12 finds little in short texts
TYPES = xllamacpp.common_speculative_type


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds target.gguf, and draft.gguf for --draft")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--draft", type=int, default=0, help="tokens that the draft model proposes")
    parser.add_argument("--lookup", type=int, default=0, help="tokens that n-gram lookup proposes")
    options = parser.parse_args()
    settings = xllamacpp.CommonParams()
    settings.model.path = str(options.folder / "target.gguf")
    settings.port, settings.verbosity, settings.n_gpu_layers = options.port, -1, 0
    settings.n_parallel, settings.n_ctx = ROWS, ROWS * CONTEXT
    if options.draft:
        draft = settings.speculative.draft
        draft.mparams.path = str(options.folder / "draft.gguf")
        # Fixed lengths: p_min would shorten drafts by the draft's confidence.
        draft.n_max, draft.n_min, draft.p_min = options.draft, 0, 0.0
        settings.speculative.types = [TYPES.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    if options.lookup:
        lookup = settings.speculative.ngram_simple
        lookup.size_n, lookup.size_m = LARGEST_NGRAM, options.lookup
        settings.speculative.types = [TYPES.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    server = xllamacpp.Server(settings)  # which serves until it is garbage-collected
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
