"""Upload of small arrays to a busy device."""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on a device, without synchronisation. On a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda" or not array.size:
        return tensor.to(device)
    # From pageable memory the host would wait for the device. torch does not reuse pinned memory before the copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)
