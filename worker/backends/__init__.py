"""Backends that run the models, and their interface to the speculative step.

A step asks a model for one thing: a *forward pass over ragged rows*, in which rows hold different numbers of tokens. A pass
processes some tokens of some rows and returns the wanted logits. It is a list of parts (`passes.py`). A part is a range of
neighbouring rows with equally many tokens, each from its own position on: decoding is one part, a prompt is one, and
sequences that verify different numbers of tokens are several.

A backend also keeps the keys and values of the rows (`RowStore`). Rows are copied, exchanged and released; rejected tokens
are overwritten by the next ones. Where a row lies, and what exchanging two rows moves, is up to the backend.

    torch            worker/backends/torch/cached_model.py   any device; the reference
    CUDA graphs      worker/backends/torch/captured_model.py the same passes, captured
    OpenVINO         worker/backends/openvino                x86 CPUs, if the package is installed

This module does not import torch, since `set_spins` must come before it.
"""

from __future__ import annotations

import os

# Spins before a waiting thread sleeps, about 0.1 ms: longer than the pauses within a forward pass, so that threads are not
# woken for every operator, but so short that an idle worker uses no processor time.
SPINS = "10000"


def set_spins() -> None:
    """Set OpenMP's spin count, which is read when torch is imported, unless the environment sets a wait policy."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
