"""A model compiled by OpenVINO, with its rows in blocks: the passes of `worker/backends/passes.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import torch

from worker.backends.openvino.blocks import BlockPool
from worker.backends.openvino.convert import BLOCK_INPUTS, TOKEN_INPUTS, cache_names
from worker.backends.passes import PassPart

CPU = torch.device("cpu")
PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}
CACHE_TYPES = {torch.float32: ov.Type.f32, torch.bfloat16: ov.Type.bf16}


def compile_model(model: ov.Model, dtype: torch.dtype, num_threads: int) -> ov.CompiledModel:
    """The model in the numbers that were asked for: computed in dtype, keys and values kept in dtype."""
    precision = PRECISIONS[dtype]
    options = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,  # else it is u8
        "INFERENCE_NUM_THREADS": num_threads,
        "NUM_STREAMS": 1,
    }
    return ov.Core().compile_model(model, "CPU", options)


class OpenVinoModel:
    """A `PassModel`. model: what was converted, kept since the compiled one reads its weights."""

    device = CPU

    def __init__(self, compiled: ov.CompiledModel, pool: BlockPool, max_context_length: int, model: Any) -> None:
        self.pool = pool
        self.max_context_length = max_context_length
        self.num_first_uses = 0
        self._model = model
        self._seen: set[tuple[int, int]] = set()  # tokens and wanted logits of passes
        self._request = compiled.create_infer_request()
        for name, cache in zip(cache_names(len(pool.shapes)), pool.caches, strict=True):
            self._request.set_tensor(name, ov.Tensor(cache, list(cache.shape), CACHE_TYPES[pool.dtype]))

    def forward(self, parts: Sequence[PassPart]) -> list[torch.Tensor]:
        """As PassModel."""
        pasts = [part.rows.starts + part.column for part in parts]
        counts = np.repeat([part.num_queries for part in parts], [len(past) for past in pasts])
        past, wanted = np.concatenate(pasts), _wanted(parts)
        blocks = [
            self.pool.reach(part.rows.first_row, past + part.num_queries)
            for part, past in zip(parts, pasts, strict=True)
        ]
        ends = past + counts
        begins = _begins(counts)
        places = np.arange(begins[-1]) + np.repeat(past - begins[:-1], counts)
        inputs = (
            np.concatenate([part.ids.numpy().reshape(-1) for part in parts]),
            np.minimum(places, self.max_context_length - 1),
            wanted,
            past.astype(np.int32),
            begins,
            np.concatenate([indices for indices, _ in blocks]),
            _begins(np.concatenate([numbers for _, numbers in blocks])),
            np.array(ends.max(), np.int32),
        )
        logits = self._infer(inputs)
        pieces = logits.split([len(part.ids) * part.num_logits for part in parts])
        return [piece.unflatten(0, (len(part.ids), -1)) for piece, part in zip(pieces, parts, strict=True)]

    def _infer(self, inputs: Sequence[np.ndarray]) -> torch.Tensor:
        """Logits [wanted, vocab]; they lie in the request's own memory."""
        for name, array in zip((*TOKEN_INPUTS, *BLOCK_INPUTS), inputs, strict=True):
            self._request.set_tensor(name, ov.Tensor(array, shared_memory=True))
        self._request.infer()
        shape = len(inputs[0]), len(inputs[2])
        if shape not in self._seen:
            self._seen.add(shape)
            self.num_first_uses += 1
        return torch.from_numpy(self._request.get_output_tensor(0).data)


def _begins(counts: np.ndarray) -> np.ndarray:
    """[0, counts[0], counts[0] + counts[1], ...] as int32."""
    begins = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=begins[1:])
    return begins


def _wanted(parts: Sequence[PassPart]) -> np.ndarray:
    """Places in the pass of the tokens whose logits are wanted."""
    wanted, offset = [], 0
    for part in parts:
        rows, queries = part.ids.shape
        lasts = offset + queries * np.arange(1, rows + 1)
        wanted.append((lasts[:, None] + np.arange(-part.num_logits, 0)).reshape(-1))
        offset += rows * queries
    return np.concatenate(wanted)
