"""Devices and dtypes that models run on, and uploads to a device."""

from __future__ import annotations

import numpy as np
import torch

from speclen.worker.models.naming import ModelError

# Below this many parameters a CPU runs float32 as fast as bfloat16: the weights stay in the cache either way.
CPU_FLOAT32_PARAMETERS = 20_000_000


def resolve_device(device: str) -> torch.device:
    """The device for "auto", "cpu", "cuda" or "cuda:N" on this machine. Raises ModelError if it does not exist."""
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    resolved = torch.device(device)
    if resolved.type == "cuda":
        resolved = torch.device("cuda", resolved.index or 0)
        if not torch.cuda.is_available():
            raise ModelError(f"device {device!r} was asked for, but torch sees no CUDA device; use --device cpu")
        if resolved.index >= torch.cuda.device_count():
            raise ModelError(f"device {device!r} does not exist; this machine has {torch.cuda.device_count()}")
    return resolved


def resolve_dtype(dtype: str, device: torch.device, num_parameters: int) -> torch.dtype:
    """The dtype of both models. "auto" is the fastest one that keeps the model's quality.

    CUDA: bfloat16 if the GPU computes in it, else float16. CPU: bfloat16 if the target has at least 20 million parameters
    and the CPU has bfloat16 instructions, since decoding then reads half the bytes; else float32.
    """
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    large = num_parameters >= CPU_FLOAT32_PARAMETERS
    return torch.bfloat16 if large and cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16() -> bool:
    """True if matrix products in bfloat16 have instructions of their own: AVX-512 BF16, AMX, or ARM's BF16."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device without synchronisation. On a CPU the result shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda" or not array.size:
        return tensor.to(device)
    # A copy from pageable memory would wait for the device. torch does not reuse pinned memory before the copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)
