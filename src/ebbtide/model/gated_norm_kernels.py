"""The gated norms of block_reference.py as Triton kernels. Rows are as narrow as a head, so that a program has several
of them at once. T is known to no kernel when it is compiled."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.model.block_kernels import UNFUSED, persistent_programs, scaled_by_root
from ebbtide.model.block_reference import Norm
from ebbtide.model.launch import Launcher

NUMBERS = 4096  # that a program has at once, where rows are not longer: 32 rows of a head with 128 channels
PROGRAMS = 8  # of the backward, on each multiprocessor


@triton.jit
def _normed(value, scale, eps, width: tl.constexpr, kind: tl.constexpr, wide: tl.constexpr):
    """(the roots of rows [R, 1], what they multiply the weight with, the norm as it is rounded)."""
    root = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
    scaled = scaled_by_root(value, root, kind, wide)
    return root, scaled, (scaled * scale).to(kind).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _gated_norm(
    x,  # [rows, width]
    gate,
    weight,
    out,
    rows,
    eps,
    offset,
    width: tl.constexpr,
    padded: tl.constexpr,
    at_once: tl.constexpr,
    wide: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64) * at_once + tl.arange(0, at_once), tl.arange(0, padded)
    place, real = row[:, None] * width + column[None, :], (row < rows)[:, None] & (column < width)[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    scale = (tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset)[None, :]
    value = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
    opened = tl.load(gate + place, mask=real, other=0.0).to(tl.float32)
    _, _, normed = _normed(value, scale, eps, width, kind, wide)
    tl.store(out + place, (normed * (opened / (1.0 + tl.exp(-opened)))).to(kind), mask=real)


@triton.jit(do_not_specialize=["rows"])
def _gated_norm_backward(
    x,  # [rows, width]
    gate,
    weight,
    grad,
    dx,
    dgate,
    partials,  # [programs, width]
    rows,
    eps,
    offset,
    width: tl.constexpr,
    padded: tl.constexpr,
    at_once: tl.constexpr,
    wide: tl.constexpr,
):
    program, column = tl.program_id(0), tl.arange(0, padded)
    kind: tl.constexpr = dx.dtype.element_ty
    scale = (tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset)[None, :]
    total = tl.zeros([padded], tl.float32)
    for first in range(program * at_once, rows, tl.num_programs(0) * at_once):
        row = tl.cast(first, tl.int64) + tl.arange(0, at_once)
        place, real = row[:, None] * width + column[None, :], (row < rows)[:, None] & (column < width)[None, :]
        value = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
        opened = tl.load(gate + place, mask=real, other=0.0).to(tl.float32)
        above = tl.load(grad + place, mask=real, other=0.0).to(tl.float32)
        root, scaled, normed = _normed(value, scale, eps, width, kind, wide)
        share = 1.0 / (1.0 + tl.exp(-opened))
        of_gate = above * normed * (share + opened * share * (1.0 - share))
        of_norm = above * opened * share
        total += tl.sum(of_norm * scaled, 0)
        of_scaled = of_norm * scale
        shared = (tl.sum(of_scaled * value, 1) / width)[:, None] * root
        tl.store(dx + place, (root * (of_scaled - value * root * shared)).to(kind), mask=real)
        tl.store(dgate + place, of_gate.to(kind), mask=real)
    tl.store(partials + program.to(tl.int64) * width + column, total, mask=column < width)


_launch, _launch_backward = Launcher(_gated_norm, **UNFUSED), Launcher(_gated_norm_backward, **UNFUSED)


def _tile(width: int) -> tuple[int, int, int]:
    """(a row's numbers with padding, the rows of a program, its warps)."""
    padded = triton.next_power_of_2(width)
    return padded, max(1, NUMBERS // padded), 4 if padded <= NUMBERS else 8


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """The same as `block_reference.gated_norm`."""
    (rows, width), x, gate = x.shape, x.contiguous(), gate.contiguous()
    out, (padded, at_once, warps) = torch.empty_like(x), _tile(width)
    programs, numbers = triton.cdiv(rows, at_once), (rows, norm.eps, norm.offset)
    _launch(programs, (x, gate, weight, out), numbers, width, padded, at_once, norm.wide, warps=warps)
    return out


def gated_norm_backward(
    x: Tensor, gate: Tensor, weight: Tensor, norm: Norm, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `block_reference.gated_norm_backward`."""
    (rows, width), x, gate, grad = x.shape, x.contiguous(), gate.contiguous(), grad.contiguous()
    dx, dgate, (padded, at_once, warps) = torch.empty_like(x), torch.empty_like(gate), _tile(width)
    programs = persistent_programs(x, triton.cdiv(rows, at_once), PROGRAMS)
    partials = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    tensors, numbers = (x, gate, weight, grad, dx, dgate, partials), (rows, norm.eps, norm.offset)
    _launch_backward(programs, tensors, numbers, width, padded, at_once, norm.wide, warps=warps)
    return dx, dgate, partials.sum(0).to(weight.dtype)
