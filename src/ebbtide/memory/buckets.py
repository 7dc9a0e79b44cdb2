"""Buckets: tensors are put end to end into a few large ones, so that moving them takes a few large copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ebbtide.system.units import ceil_div

BUCKET = 512 * 2**20  # bytes: a copy this long runs at host link speed, and moves still overlap in pieces
ALIGNMENT = 256  # bytes: the alignment that vectorised kernels want


def allocate_buckets(
    shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device, limit: int = BUCKET
) -> tuple[list[Tensor], list[Tensor]]:
    """Allocates buckets, uninitialised, and returns (flat buckets, one view per entry of `shapes`). A tensor never
    straddles two buckets."""
    step = max(1, ALIGNMENT // dtype.itemsize)
    groups: list[list[torch.Size]] = []
    used = 0
    for shape in shapes:
        size = ceil_div(shape.numel(), step) * step
        if not groups or (used + size) * dtype.itemsize > limit:
            groups.append([])
            used = 0
        groups[-1].append(shape)
        used += size
    flats, views = [], []
    for group in groups:
        sizes = [ceil_div(shape.numel(), step) * step for shape in group]
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        flats.append(flat)
        for shape, part in zip(group, flat.split(sizes), strict=True):
            views.append(part[: shape.numel()].view(shape))
    return flats, views
