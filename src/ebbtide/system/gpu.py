"""What kernels ask of a GPU."""

from __future__ import annotations

from functools import cache

import torch

HOPPER = 9


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Its compute capability; (0, 0) for an AMD GPU, whose numbers are others."""
    return (0, 0) if torch.version.hip is not None else torch.cuda.get_device_capability(device)


def generation(device: torch.device) -> int:
    """The first number of its compute capability, such as `HOPPER`; 0 for an AMD GPU."""
    return capability(device)[0]


@cache
def processors(device: torch.device) -> int:
    """How many multiprocessors it has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
