"""again.py's two elementwise operations as one Triton kernel: the input is read once, and what a norm saved is written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # numbers that a program makes


@triton.jit
def _again(x, roots, wide, normed, count, width, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    root = tl.load(roots + place // width, mask=inside, other=0.0)
    tl.store(wide + place, value, mask=inside)
    tl.store(normed + place, (value * root).to(normed.dtype.element_ty), mask=inside)


def again(x: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
    """As again.norm_again."""
    x, wide, normed = (
        x.contiguous(),
        torch.empty(x.shape, dtype=torch.float32, device=x.device),
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
    )
    _again[(triton.cdiv(x.numel(), BLOCK),)](x, roots.contiguous(), wide, normed, x.numel(), x.shape[-1], BLOCK, num_warps=8)
    return wide, normed
