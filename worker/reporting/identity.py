"""Identity of a context and a process: models, device, dtype, engine."""

from __future__ import annotations

import os
import socket
from importlib.metadata import version

import torch

from speclen.transport.version import installed_version
from speclen.v1 import control_pb2 as pb
from speclen.worker.models.devices import device_name
from speclen.worker.models.loading import ModelPair
from speclen.worker.models.naming import digest, model_label


def model_name(name: str, model: torch.nn.Module | None) -> str:
    """Label of a model; "none" for none."""
    return "none" if model is None else model_label(name, model.config.to_dict())  # type: ignore[union-attr, operator]


def context_key(pair: ModelPair, backend: str) -> pb.ContextKey:
    """The context of this worker's step times. backend: name and version."""
    others = " ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    versions = f"speclen {installed_version()} {others}"
    engine = f"{versions} {backend} threads {torch.get_num_threads()}"
    return pb.ContextKey(
        target=model_name(pair.target_name, pair.target),
        draft=model_name(pair.draft_name, pair.draft),
        device=device_name(pair.device),
        dtype=str(pair.dtype).removeprefix("torch."),
        engine_fingerprint=f"{backend.partition(' ')[0]},threads={torch.get_num_threads()},{digest(engine)}",
    )


def server_identity(run_id: str) -> pb.ServerIdentity:
    """The identity of this process."""
    return pb.ServerIdentity(
        run_id=run_id, host=socket.gethostname(), process_id=os.getpid(), version=installed_version()
    )
