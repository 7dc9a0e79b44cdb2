"""Lays tensors end to end in a few large buckets, so that moving them is a few large copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BUCKET = 512 * 2**20  # bytes: long enough that a copy runs at link speed, short enough that moves overlap in pieces
ALIGNMENT = 256  # bytes: every tensor starts where vectorised kernels want it


def buckets(
    shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device, limit: int = BUCKET
) -> tuple[list[Tensor], list[Tensor]]:
    """(flat buckets, one view of its shape per entry of `shapes`), not initialised. A tensor never straddles two buckets."""
    step = max(1, ALIGNMENT // dtype.itemsize)
    groups: list[list[torch.Size]] = []
    used = 0
    for shape in shapes:
        size = -(-shape.numel() // step) * step
        if not groups or (used + size) * dtype.itemsize > limit:
            groups.append([])
            used = 0
        groups[-1].append(shape)
        used += size
    flats, views = [], []
    for group in groups:
        sizes = [-(-shape.numel() // step) * step for shape in group]
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        flats.append(flat)
        for shape, part in zip(group, flat.split(sizes), strict=True):
            views.append(part[: shape.numel()].view(shape))
    return flats, views
