"""Small arrays on their way to a device, while it is busy."""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on a device, for which nobody waits. On a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda" or not array.size:
        return tensor.to(device)
    # From pageable memory the host would wait for all that the device was given before. torch does not use this memory
    # for anything else until it is copied.
    return tensor.pin_memory().to(device, non_blocking=True)
