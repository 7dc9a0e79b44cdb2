"""Matmuls of the experts of few tokens as Triton kernels, for decode, which reads the matrices of all experts for a few
rows each.

A program computes some columns of one expert, for all of its rows: how many there are is read on the device. Nothing is
split, and a tile changes no bit: they are those of torch's grouped matmul, which multiplies many rows. The kernels are
started early (dependent_launch.py), and the first of them gathers its rows and computes the activation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ebbtide.model.block_kernels import UNFUSED, activated
from ebbtide.model.block_reference import Activation
from ebbtide.model.dependent_launch import wait_for_results
from ebbtide.model.launch import launch_options, starts_early
from ebbtide.model.linear_kernels import FETCHED, Tile, can_load, fetch

MOST_ROWS, MOST_EACH = 1024, 64  # Of more rows, of all experts or on average of each, torch's kernel multiplies.
SHALLOWEST = 64  # Numbers of a row that a program loads at once: a divisor of the depth.


@triton.jit
def _rows_of(ends, expert):
    """The first row of an expert, and the one after its last."""
    return tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)


@triton.jit
def _store(out, found, row, end, first_column, width: tl.constexpr, columns: tl.constexpr):
    column = first_column + tl.arange(0, columns)
    target = out + row[:, None].to(tl.int64) * width + column[None, :]
    tl.store(target, found, mask=(row < end)[:, None] & (column < width)[None, :])


@triton.jit
def _grouped_linear(
    x,  # descriptor of [rows, depth]
    weight,  # descriptor of [experts * width, depth]
    matrix,  # the weight
    ends,  # [experts]
    out,  # [rows, width]
    width: tl.constexpr,
    depth: tl.constexpr,
    tile: tl.constexpr,
    columns: tl.constexpr,
    at_once: tl.constexpr,
    fetches: tl.constexpr,
    early: tl.constexpr,
):
    first_column, expert = tl.program_id(0) * columns, tl.program_id(1)
    above = expert * width + first_column
    if fetches:
        fetch(matrix, above, columns, tl.num_programs(1) * width, depth, early)
    wait_for_results(early)
    begin, end = _rows_of(ends, expert)
    for first_row in range(begin, end, tile):
        total = tl.zeros([tile, columns], tl.float32)
        for at in range(0, depth, at_once):
            total = tl.dot(x.load([first_row, at]), weight.load([above, at]).T, total)
        row = first_row + tl.arange(0, tile)
        _store(out, total.to(out.dtype.element_ty), row, end, first_column, width, columns)


@triton.jit
def _gated_grouped_linear(
    x,  # [T, depth]
    weight,  # descriptor of [experts * 2 * width, depth]: of each expert's gate, then of its other half
    matrix,  # the weight
    order,  # [rows]
    ends,  # [experts]
    out,  # [rows, width]
    width: tl.constexpr,
    depth: tl.constexpr,
    visited: tl.constexpr,
    tile: tl.constexpr,
    columns: tl.constexpr,
    at_once: tl.constexpr,
    gelu: tl.constexpr,
    fetches: tl.constexpr,
    early: tl.constexpr,
):
    first_column, expert = tl.program_id(0) * columns, tl.program_id(1)
    above = expert * 2 * width + first_column
    if fetches:
        fetch(matrix, above, columns, tl.num_programs(1) * 2 * width, depth, early)
        fetch(matrix, above + width, columns, tl.num_programs(1) * 2 * width, depth, early)
    wait_for_results(early)
    begin, end = _rows_of(ends, expert)
    kind: tl.constexpr = out.dtype.element_ty
    for first_row in range(begin, end, tile):
        row = first_row + tl.arange(0, tile)
        token = tl.load(order + tl.minimum(row, end - 1)) // visited
        source = x + token[:, None] * depth + tl.arange(0, at_once)[None, :]
        gate = tl.zeros([tile, columns], tl.float32)
        up = tl.zeros([tile, columns], tl.float32)
        for at in range(0, depth, at_once):
            part = tl.load(source + at)
            gate = tl.dot(part, weight.load([above, at]).T, gate)
            up = tl.dot(part, weight.load([above + width, at]).T, up)
        found = activated(gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32), kind, gelu)
        _store(out, found, row, end, first_column, width, columns)


def takes(x: Tensor, weight: Tensor, rows: int) -> bool:
    """Whether the products of so many rows with the matrices of experts [E, M, K] are to be computed by these
    kernels."""
    experts, _, depth = weight.shape
    few = 0 < rows <= min(MOST_ROWS, MOST_EACH * experts)
    return few and depth % SHALLOWEST == 0 and weight.is_contiguous() and can_load(x, weight.flatten(0, 1))


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`linear.grouped_linear` of what these kernels take."""
    (rows, depth), (experts, width, _) = x.shape, weight.shape
    tile = _tile(rows, experts, depth, 64)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    early = starts_early(x)
    _grouped_linear[(triton.cdiv(width, tile.columns), experts)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight.flatten(0, 1), [tile.columns, tile.depth]),
        weight, ends, out, width, depth, tile.rows, tile.columns, tile.depth, _fetches(rows, experts, depth), early,
        num_warps=tile.warps, num_stages=tile.stages, **launch_options(early),
    )  # fmt: skip
    return out


def gated_grouped_linear(
    x: Tensor, weight: Tensor, order: Tensor, ends: Tensor, visited: int, kind: Activation
) -> Tensor:
    """`linear.gated_grouped_linear` of what these kernels take."""
    rows, (experts, twice, depth) = len(order), weight.shape
    width = twice // 2
    tile = _tile(rows, experts, depth, 32)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    early = starts_early(x)
    _gated_grouped_linear[(triton.cdiv(width, tile.columns), experts)](
        x, TensorDescriptor.from_tensor(weight.flatten(0, 1), [tile.columns, tile.depth]),
        weight, order, ends, out, width, depth, visited, tile.rows, tile.columns, tile.depth, kind == "gelu_tanh",
        _fetches(rows, experts, depth), early, num_warps=tile.warps, num_stages=tile.stages, **launch_options(early),
        **UNFUSED,
    )  # fmt: skip
    return out


def _fetches(rows: int, experts: int, depth: int) -> bool:
    """Whether programs ask for their weights before they know whether their expert has rows."""
    return rows >= experts and depth >= FETCHED


def _tile(rows: int, experts: int, depth: int, columns: int) -> Tile:
    """A tile that has most experts' rows at once, small enough that a multiprocessor runs two or more."""
    each = rows / experts
    tall = 16 if each <= 8 else 32 if each <= 20 else 64
    return Tile(tall, columns, 128 if depth % 128 == 0 else SHALLOWEST, 4, 3 if tall == 64 else 4)
