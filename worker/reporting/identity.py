"""Names what step times depend on: models, device, dtype and the rest of the engine."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from importlib.metadata import version
from pathlib import Path

import torch

from speclen.v1 import control_pb2 as pb
from speclen.worker.models.devices import device_name
from speclen.worker.models.loading import ModelPair


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def model_name(name: str, model: torch.nn.Module | None) -> str:
    """Name with a digest of the configuration, so that two models of one name are told apart."""
    if model is None:
        return "none"
    config = model.config.to_dict()  # type: ignore[union-attr, operator]
    # Where it lies, and who wrote the file, is not what it is: workers on other machines share what is learned.
    what = {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
    short = name if name.startswith("bundled:") else Path(name).name
    return f"{short}#{digest(json.dumps(what, sort_keys=True, default=str))}"


def context_key(pair: ModelPair, backend: str) -> pb.ContextKey:
    """The context whose step times this worker measures. backend: what runs the passes, with its version."""
    versions = " ".join(f"{name} {version(name)}" for name in ("speclen", "torch", "transformers"))
    engine = f"{versions} {backend} threads {torch.get_num_threads()}"
    return pb.ContextKey(
        target=model_name(pair.target_name, pair.target),
        draft=model_name(pair.draft_name, pair.draft),
        device=device_name(pair.device),
        dtype=str(pair.dtype).removeprefix("torch."),
        engine_fingerprint=f"{backend.partition(' ')[0]},threads={torch.get_num_threads()},{digest(engine)}",
    )


def server_identity(run_id: str) -> pb.ServerIdentity:
    """Whose this process is."""
    return pb.ServerIdentity(
        run_id=run_id, host=socket.gethostname(), process_id=os.getpid(), version=version("speclen")
    )
