"""A model compiled by OpenVINO, with its rows in blocks: the passes of `worker/backends/passes.py`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import openvino as ov
import torch

from speclen.worker.backends.kv_cache import free_memory
from speclen.worker.backends.openvino.blocks import BlockPool
from speclen.worker.backends.openvino.convert import BLOCK_INPUTS, TOKEN_INPUTS, cache_names
from speclen.worker.backends.passes import PassPart

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}
CACHE_TYPES = {torch.float32: ov.Type.f32, torch.bfloat16: ov.Type.bf16}
MEMORY_MARGIN = 4  # times a model's weights that must be free before another copy of them is made


class OpenVinoModel:
    """A `PassModel`. model: as converted; num_weight_bytes: of its weights, which it shares with the original.

    A compiled model has a copy of the weights in its kernels' own layout, and a fixed number of threads.
    """

    device = CPU

    def __init__(
        self, model: ov.Model, num_weight_bytes: int, pool: BlockPool, max_context_length: int, num_threads: int
    ) -> None:
        self.pool = pool
        self.max_context_length = max_context_length
        self.num_first_uses = 0
        self._model = model
        self._num_weight_bytes = num_weight_bytes
        self._seen: set[tuple[int, ...]] = set()  # threads, tokens and wanted logits of passes
        self._threads = num_threads
        self._requests = {num_threads: self._make_request(num_threads)}

    def _make_request(self, num_threads: int) -> ov.InferRequest:
        """The model compiled in the numbers that were asked for: computed and kept in the pool's dtype."""
        precision = PRECISIONS[self.pool.dtype]
        options = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,  # else it is u8
            "INFERENCE_NUM_THREADS": num_threads,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,  # a thread that shares its core with another process must be able to leave
        }
        request = ov.Core().compile_model(self._model, "CPU", options).create_infer_request()
        for name, cache in zip(cache_names(len(self.pool.shapes)), self.pool.caches, strict=True):
            request.set_tensor(name, ov.Tensor(cache, list(cache.shape), CACHE_TYPES[self.pool.dtype]))
        return request

    def use_threads(self, num_threads: int) -> None:
        """As PassModel, where there is memory for another copy of the weights; the number stays where there is none."""
        if num_threads not in self._requests:
            if free_memory(CPU) < MEMORY_MARGIN * self._num_weight_bytes:
                log.warning("no memory for %d threads beside %d: their number stays", num_threads, self._threads)
                return
            self._requests[num_threads] = self._make_request(num_threads)
        self._threads = num_threads

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
        request = self._requests[self._threads]
        for name, array in zip((*TOKEN_INPUTS, *BLOCK_INPUTS), inputs, strict=True):
            request.set_tensor(name, ov.Tensor(array, shared_memory=True))
        request.infer()
        shape = self._threads, len(inputs[0]), len(inputs[2])
        if shape not in self._seen:
            self._seen.add(shape)
            self.num_first_uses += 1
        return torch.from_numpy(request.get_output_tensor(0).data)


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
