"""The recomputation of a norm's saved tensors (recompute.py) as one Triton kernel, which reads the input once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # Numbers that a program computes.


@triton.jit
def _recompute(x, roots, wide, normed, count, width, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    root = tl.load(roots + place // width, mask=inside, other=0.0)
    tl.store(wide + place, value, mask=inside)
    tl.store(normed + place, (value * root).to(normed.dtype.element_ty), mask=inside)


def recompute_norm(x: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
    """The same as `recompute.norm_again`."""
    x, wide, normed = (
        x.contiguous(),
        torch.empty(x.shape, dtype=torch.float32, device=x.device),
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
    )
    _recompute[(triton.cdiv(x.numel(), BLOCK),)](
        x, roots.contiguous(), wide, normed, x.numel(), x.shape[-1], BLOCK, num_warps=8
    )
    return wide, normed
