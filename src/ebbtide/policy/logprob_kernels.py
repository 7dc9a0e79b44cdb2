"""logprob_reference.py as two Triton kernels: each reads the logits once, where plain torch makes several fp32 passes.

On an H200 at 32,640 tokens x 151,936 the plain passes took 93 ms in addition to the 27 ms of the matmul itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK = 4096  # Columns that a program processes at a time.


@triton.jit
def shape_logits(x, scale, softcap, capped: tl.constexpr):
    slope = scale
    if capped:
        curve = libdevice.tanh(x / softcap)
        slope = scale * (1 - curve * curve)
        x = curve * softcap
    return x * scale, slope


@triton.jit
def _reduce(
    logits,
    targets,
    lses,
    logprobs,
    entropies,
    scales,  # [rows], if each row has its own
    columns,
    stride,
    scale,
    softcap,
    capped: tl.constexpr,
    by_row: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    if by_row:
        scale = tl.load(scales + row)
    # Per lane: the largest x so far, the sum of exp(x - largest), and the sum of exp(x - largest) * x. Merged once at
    # the end.
    largest = tl.full([block], -float("inf"), tl.float32)
    total = tl.zeros([block], tl.float32)
    weighted = tl.zeros([block], tl.float32)
    for first in range(0, columns, block):
        column = first + tl.arange(0, block)
        inside = column < columns
        x = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
        x, _ = shape_logits(x, scale, softcap, capped)
        new = tl.where(inside, tl.maximum(largest, x), largest)
        shrink = tl.where(largest == new, 1.0, tl.exp(largest - new))
        grown = tl.where(inside, tl.exp(x - new), 0.0)
        total = total * shrink + grown
        weighted = weighted * shrink + grown * x
        largest = new
    top = tl.max(largest, 0)
    share = tl.exp(largest - top)
    sum_all = tl.sum(total * share, 0)
    lse = top + tl.log(sum_all)
    mean = tl.sum(weighted * share, 0) / sum_all
    chosen = tl.load(start + tl.load(targets + row)).to(tl.float32)
    chosen, _ = shape_logits(chosen, scale, softcap, capped)
    tl.store(lses + row, lse)
    tl.store(logprobs + row, chosen - lse)
    tl.store(entropies + row, lse - mean)


@triton.jit
def _gradient(
    logits,
    targets,
    lses,
    entropies,
    grad_logprobs,
    grad_entropies,
    columns,
    stride,
    scale,
    softcap,
    capped: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    place = logits + row * stride + column
    x, slope = shape_logits(tl.load(place, mask=inside, other=0.0).to(tl.float32), scale, softcap, capped)
    logprob = x - tl.load(lses + row)
    grad_logprob = tl.load(grad_logprobs + row)
    by_p = tl.load(grad_entropies + row) * (logprob + tl.load(entropies + row)) + grad_logprob
    grad = tl.where(column == tl.load(targets + row), grad_logprob, 0.0) - tl.exp(logprob) * by_p
    tl.store(place, (grad * slope).to(logits.dtype.element_ty), mask=inside)


def reduce(
    logits: Tensor, targets: Tensor, scale: float | Tensor, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `logprob_reference.reduce`. A scale for each row [c] gives the bits of one for all."""
    by_row = isinstance(scale, Tensor)
    count, columns = logits.shape
    lse = torch.empty(count, dtype=torch.float32, device=logits.device)
    logprobs, entropy = torch.empty_like(lse), torch.empty_like(lse)
    _reduce[(count,)](
        logits,
        targets,
        lse,
        logprobs,
        entropy,
        scale if by_row else lse,
        columns,
        logits.stride(0),
        1.0 if by_row else scale,
        softcap or 0.0,
        softcap is not None,
        by_row,
        BLOCK,
        num_warps=8,
        enable_fp_fusion=False,  # so that both variants round alike
    )
    return lse, logprobs, entropy


def gradient(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """The same as `logprob_reference.gradient`, written over the logits."""
    count, columns = logits.shape
    _gradient[(count, triton.cdiv(columns, BLOCK))](
        logits,
        targets.contiguous(),
        lse,
        entropy,
        grad_logprob.contiguous(),
        grad_entropy.contiguous(),
        columns,
        logits.stride(0),
        scale,
        softcap or 0.0,
        softcap is not None,
        BLOCK,
        num_warps=8,
    )
    return logits
