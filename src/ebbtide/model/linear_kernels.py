"""Matmuls of few rows by few columns as a Triton kernel, for decode; and of few columns whose number is no multiple of
8, with any rows.

cuBLAS splits the inner dimension of such a matmul, so that there is work for a whole GPU, and adds up the parts: other
bits than those of many rows. Told not to, it is slow in some shapes. Here nothing is split, and a program has 16
columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ebbtide.model.linear_sizes import ALIGNED, NARROW

COLUMNS, DEPTH, STAGES = 16, 256, 4  # of a program
# Larger products are cuBLAS's, which on an H200 is about as fast there without split-K as with it; below, many take it
# ten times as long.
MOST_ROWS, MOST_NUMBERS = 128, 120_000


@triton.jit(do_not_specialize=["rows", "width", "depth"])
def _linear(
    x,  # descriptor of [rows, depth]
    weight,  # descriptor of [width, depth]
    bias,  # [width]
    out,  # [rows, width]
    rows,
    width,
    depth,
    tile: tl.constexpr,
    columns: tl.constexpr,
    at_once: tl.constexpr,
    biased: tl.constexpr,
):
    first_column, first_row = tl.program_id(0) * columns, tl.program_id(1) * tile
    total = tl.zeros([tile, columns], tl.float32)
    for at in range(0, depth, at_once):
        total = tl.dot(x.load([first_row, at]), weight.load([first_column, at]).T, total)
    row, column = first_row + tl.arange(0, tile), first_column + tl.arange(0, columns)
    if biased:
        total += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None] * width + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < width)[None, :])


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the product is one for this kernel: a small one, or a narrow one of a width for which cuBLAS has kernels
    that add in another order; of tensors at addresses that it can load from."""
    rows, width = len(x), len(weight)
    is_small = rows <= MOST_ROWS and rows * width <= MOST_NUMBERS
    return (is_small or (width % ALIGNED != 0 and width < NARROW)) and can_load(x, weight)


def can_load(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel can load from these tensors."""
    depth = weight.shape[1]
    aligned = len(x) > 0 and depth % 8 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return aligned and x.is_contiguous() and weight.is_contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] @ weight.T [K, N] + bias [N], for what this kernel `takes`."""
    rows, (width, depth) = len(x), weight.shape
    tile, warps = _tile(rows, width)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    _linear[(triton.cdiv(width, COLUMNS), triton.cdiv(rows, tile))](
        TensorDescriptor.from_tensor(x, [tile, DEPTH]), TensorDescriptor.from_tensor(weight, [COLUMNS, DEPTH]),
        out if bias is None else bias, out, rows, width, depth, tile, COLUMNS, DEPTH, bias is not None,
        num_warps=warps, num_stages=STAGES,
    )  # fmt: skip
    return out


def _tile(rows: int, width: int) -> tuple[int, int]:
    """(rows, warps) of a program: what was fastest. Rows past the end take as long to load as others, or longer."""
    if rows % 64 == 0:
        return 64, 4
    if rows % 32 == 0 and (rows > 32 or width > 2560):
        return 32, 2
    return 16, 1
