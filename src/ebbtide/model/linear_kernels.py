"""Matmuls of few rows as Triton kernels, for decode; and of few columns whose number is no multiple of 8, with any
rows.

cuBLAS splits the inner dimension of such a matmul, so that there is work for a whole GPU, and adds up the parts: other
bits than those of many rows. Told not to, it is slow in some shapes. Here nothing is split, and the tiles are such that
all programs of a matmul run at once. A tile changes no bit.

These kernels are started early (dependent_launch.py), which those of cuBLAS are not. The two halves of a gated MLP are
one matmul with its activation, which `activate` would read and write memory for.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ebbtide.model.block_kernels import UNFUSED, activated
from ebbtide.model.block_reference import Activation
from ebbtide.model.dependent_launch import load_into_cache, wait_for_results
from ebbtide.model.launch import launch_options, starts_early
from ebbtide.model.linear_sizes import ALIGNED, NARROW
from ebbtide.system.gpu import processors

MOST_ROWS = 128  # Of more, cuBLAS's kernels are as fast without split-K as with it.
SMALL = 120_000  # Rows times columns: below, cuBLAS takes ten times as long in many shapes without split-K.
FETCHED = 256  # Numbers of each row of a weight that a program asks for before it waits.


class Tile(NamedTuple):
    """What a program computes, and how."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@triton.jit
def fetch(weight, first, count: tl.constexpr, width, depth, early: tl.constexpr):
    """Moves the beginnings of rows of the weight into the cache."""
    row = tl.minimum(first + tl.arange(0, 128) % count, width - 1)
    load_into_cache((weight + row.to(tl.int64) * depth).to(tl.int64), early)


@triton.jit(do_not_specialize=["rows", "width", "depth"])
def _linear(
    x,  # descriptor of [rows, depth]
    weight,  # descriptor of [width, depth]
    matrix,  # the weight
    bias,  # [width]
    out,  # [rows, width]
    rows,
    width,
    depth,
    tile: tl.constexpr,
    columns: tl.constexpr,
    at_once: tl.constexpr,
    biased: tl.constexpr,
    fetches: tl.constexpr,
    early: tl.constexpr,
):
    first_column, first_row = tl.program_id(0) * columns, tl.program_id(1) * tile
    if fetches:
        fetch(matrix, first_column, columns, width, depth, early)
    wait_for_results(early)
    total = tl.zeros([tile, columns], tl.float32)
    for at in range(0, depth, at_once):
        total = tl.dot(x.load([first_row, at]), weight.load([first_column, at]).T, total)
    row, column = first_row + tl.arange(0, tile), first_column + tl.arange(0, columns)
    if biased:
        total += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None] * width + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["rows", "width", "depth"])
def _gated_linear(
    x,  # descriptor of [rows, depth]
    weight,  # descriptor of [2 * width, depth]: of the gate, then of the other half
    matrix,  # the weight
    out,  # [rows, width]
    rows,
    width,
    depth,
    tile: tl.constexpr,
    columns: tl.constexpr,
    at_once: tl.constexpr,
    gelu: tl.constexpr,
    fetches: tl.constexpr,
    early: tl.constexpr,
):
    first_column, first_row = tl.program_id(0) * columns, tl.program_id(1) * tile
    if fetches:
        fetch(matrix, first_column, columns, 2 * width, depth, early)
        fetch(matrix, width + first_column, columns, 2 * width, depth, early)
    wait_for_results(early)
    gate = tl.zeros([tile, columns], tl.float32)
    up = tl.zeros([tile, columns], tl.float32)
    for at in range(0, depth, at_once):
        part = x.load([first_row, at])
        gate = tl.dot(part, weight.load([first_column, at]).T, gate)
        up = tl.dot(part, weight.load([width + first_column, at]).T, up)
    kind: tl.constexpr = out.dtype.element_ty
    found = activated(gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32), kind, gelu)
    row, column = first_row + tl.arange(0, tile), first_column + tl.arange(0, columns)
    target = out + row[:, None] * width + column[None, :]
    tl.store(target, found, mask=(row < rows)[:, None] & (column < width)[None, :])


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the product is one for this kernel: one of few rows, or a narrow one of a width for which cuBLAS has
    kernels that add in another order; of tensors at addresses that it can load from."""
    return tile_of(x, weight) is not None and can_load(x, weight)


def can_load(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel can load from these tensors."""
    depth = weight.shape[1]
    aligned = len(x) > 0 and depth % 8 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return aligned and x.is_contiguous() and weight.is_contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] @ weight.T [K, N] + bias [N], of tensors that this kernel `can_load`."""
    rows, (width, depth) = len(x), weight.shape
    tile = tile_of(x, weight) or _narrow_tile(rows, width)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    early = starts_early(x)
    _linear[(triton.cdiv(width, tile.columns), triton.cdiv(rows, tile.rows))](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
        weight, out if bias is None else bias, out, rows, width, depth, tile.rows, tile.columns, tile.depth,
        bias is not None, depth >= FETCHED, early, num_warps=tile.warps, num_stages=tile.stages,
        **launch_options(early),
    )  # fmt: skip
    return out


def takes_gated(x: Tensor, weight: Tensor) -> bool:
    """Whether both halves of a gated MLP are to be computed by this kernel."""
    return gated_tile(x, weight) is not None and can_load(x, weight)


def gated_linear(x: Tensor, weight: Tensor, kind: Activation) -> Tensor:
    """`activate(x [T, K] @ weight.T [K, 2 N], kind)`: [T, N], for what this kernel `takes_gated`."""
    rows, width, depth = len(x), len(weight) // 2, weight.shape[1]
    tile = gated_tile(x, weight)
    assert tile is not None
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    early = starts_early(x)
    _gated_linear[(triton.cdiv(width, tile.columns), triton.cdiv(rows, tile.rows))](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
        weight, out, rows, width, depth, tile.rows, tile.columns, tile.depth, kind == "gelu_tanh", depth >= FETCHED,
        early, num_warps=tile.warps, num_stages=tile.stages, **launch_options(early), **UNFUSED,
    )  # fmt: skip
    return out


def tile_of(x: Tensor, weight: Tensor) -> Tile | None:
    """The tile of a product, None if it is cuBLAS's."""
    rows, (width, depth) = len(x), weight.shape
    tile = _one_wave(rows, width, depth, processors(x.device)) if rows <= MOST_ROWS else None
    is_small = rows <= MOST_ROWS and rows * width <= SMALL
    if tile is None and (is_small or (width % ALIGNED != 0 and width < NARROW)):
        tile = _narrow_tile(rows, width)
    return tile


def gated_tile(x: Tensor, weight: Tensor) -> Tile | None:
    """The tile of both halves of a gated MLP, None if they are cuBLAS's."""
    if len(x) > MOST_ROWS:
        return None
    return _gated_tile(len(x), len(weight) // 2, processors(x.device))


# The fastest of those tried on an H200, on the matmuls of models from 0.5B to 8B. Rows past the end of a tile take as
# long to load as others, or longer.


@cache
def _one_wave(rows: int, width: int, depth: int, processors: int) -> Tile | None:
    """A tile of which a GPU's multiprocessors have one each, so that all are loading at once; None if there is none
    that is as fast as cuBLAS's."""
    if rows <= 16:
        return Tile(16, 16, 256, 1, 4) if width <= 36 * processors else Tile(16, 32, 256, 2, 4)
    if rows == 32:
        return Tile(16, 16, 256, 1, 4) if width <= 16 * processors else Tile(32, 16, 256, 2, 4)
    if rows == 64:
        if width <= 16 * processors:
            return Tile(64, 16, 256, 4, 5)
        return Tile(64, 32, 128, 4, 8) if width <= 32 * processors and depth <= 6144 else None
    if rows == 128:
        if width <= 16 * processors:
            return Tile(64, 32, 256, 4, 4) if depth <= 4096 else Tile(64, 32, 128, 4, 8)
        return Tile(64, 64, 128, 4, 6) if width <= 32 * processors and depth <= 4096 else None
    return None


def _narrow_tile(rows: int, width: int) -> Tile:
    """The tile of a product that is too small, or too odd, for the others."""
    if rows % 64 == 0:
        return Tile(64, 16, 256, 4, 4)
    if rows % 32 == 0 and (rows > 32 or width > 2560):
        return Tile(32, 16, 256, 2, 4)
    return Tile(16, 16, 256, 1, 4)


@cache
def _gated_tile(rows: int, width: int, processors: int) -> Tile | None:
    """The tile of both halves of a gated MLP of so many columns each; None if cuBLAS is as fast, with a kernel for the
    activation."""
    if rows <= 16:
        return Tile(16, 16, 256, 2, 4) if width <= 32 * processors else Tile(16, 32, 128, 4, 4)
    if rows == 32:
        return Tile(32, 16, 256, 2, 4) if width <= 32 * processors else Tile(32, 32, 128, 2, 4)
    if rows == 64:
        if width <= 32 * processors:
            return Tile(64, 32, 128, 4, 5)
        return Tile(64, 64, 64, 4, 6) if width <= 64 * processors else Tile(64, 32, 64, 4, 4)
    if rows == 128 and width <= 64 * processors:
        return Tile(64, 64, 64, 4, 7) if width <= 32 * processors else Tile(128, 64, 64, 4, 5)
    return None
