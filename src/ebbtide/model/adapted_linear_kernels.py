"""Matmuls of few rows with what adapters (LoRA) add to them as one Triton kernel each, for decode.

The first programs multiply x with A, and count themselves; there are as many as a GPU has room for beside the others,
which multiply x with the weight meanwhile, as linear_kernels.py does. Those then wait for the count, and multiply with
B. All is summed in the order of adapter_kernels.py, rounded where that rounds, and has its bits.

A program that waits needs the first ones to run. They do, as a GPU starts programs in order; all of a launch have ended
when those of the next one count.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ebbtide.model.adapter_kernels import LAYERS, Adapters, chunk_size, power_of_2, shrink_chunk
from ebbtide.model.block_kernels import UNFUSED, activated
from ebbtide.model.block_reference import Activation
from ebbtide.model.dependent_launch import wait_for_results
from ebbtide.model.launch import launch_options, starts_early
from ebbtide.model.linear_kernels import FETCHED, MOST_ROWS, Tile, can_load, fetch, gated_tile, tile_of
from ebbtide.system.gpu import processors
from ebbtide.system.units import ceil_div

MOST_RANK = 64
SHARED = 220 * 1024  # bytes of a multiprocessor's shared memory


class _ShrinkTile(NamedTuple):
    """How x A.T is divided among programs, each of which has some rows, some channels and one chunk or both."""

    rows: int
    columns: int
    depth: int  # at once
    stages: int
    chunk: int
    parts: int
    blocks: int  # of channels
    programs: int


@triton.jit
def _shrink(
    x, first, matrix, sums, ended, program, rows, depth, channels, blocks, of_tile,
    parts: tl.constexpr, chunk: tl.constexpr, tile: tl.constexpr, columns: tl.constexpr, at_once: tl.constexpr,
    stages: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Multiplies some rows of x with a chunk of some rows of A, or with both chunks, and counts itself."""
    part, block = program % parts, program // parts
    first_row, first_channel = block // blocks * tile, block % blocks * columns
    shrink_chunk(x, first, matrix, sums, part, first_row, first_channel, rows, depth, channels,
                 parts, chunk, tile, columns, at_once, stages, early)  # fmt: skip
    tl.debug_barrier()  # All threads have stored before one says so.
    tl.atomic_add(ended + first_row // of_tile, 1, sem="release")


@triton.jit
def _wait_for_sums(ended, needed, readers, is_first):
    """Waits for so many programs. When all `readers` have waited, the count is 0 again."""
    found = tl.atomic_add(ended, 0, sem="acquire")
    while (found >= 0) & (found < needed):
        found = tl.atomic_add(ended, 0, sem="acquire")
    tl.atomic_add(ended, tl.where(is_first, 1 - needed - readers, 1), sem="relaxed")


@triton.jit
def _adapted(
    total, factor, sums, scale, row, rows, first_channel, channels,
    parts: tl.constexpr, rank: tl.constexpr, padded: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """A product, rounded, with what an adapter adds to it, rounded again."""
    place = tl.arange(0, padded)
    inside = (row < rows)[:, None] & (place < rank)[None, :]
    where = sums + row[:, None] * channels + (first_channel + place)[None, :]
    low = tl.load(where, mask=inside, other=0.0, cache_modifier=".cg")
    if parts == 2:
        low += tl.load(where + rows * channels, mask=inside, other=0.0, cache_modifier=".cg")
    added = tl.dot(low.to(kind), factor.T)
    return tl.fma(added, scale, total.to(kind).to(tl.float32)).to(kind)


@triton.jit
def _factor(second, column, width, rank: tl.constexpr, padded: tl.constexpr):
    """Rows of B."""
    place = tl.arange(0, padded)
    mask = (column < width)[:, None] & (place < rank)[None, :]
    return tl.load(second + column[:, None] * rank + place[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["rows", "depth", "shrinking", "low_blocks"])
def _linear(
    x,  # descriptor of [rows, depth]
    weight,  # descriptor of [width, depth]
    low_x,  # descriptor of x, for programs that multiply with A
    first,  # descriptor of [channels, depth]: A of all layers
    matrix,  # the weight
    all_first,  # A
    bias,  # [width]
    second_0,  # [end_0, rank]: B of each layer
    second_1,
    second_2,
    sums,  # [parts, rows, channels]: x A.T, or its chunks in float32
    ended,  # [tiles of rows]: zeros before and after
    out,  # [rows, width]
    scale,
    rows,
    depth,
    shrinking,  # programs that multiply with A
    low_blocks,
    width: tl.constexpr,
    end_0: tl.constexpr,  # the column after each layer's last
    end_1: tl.constexpr,
    channels: tl.constexpr,
    rank: tl.constexpr,
    padded: tl.constexpr,
    parts: tl.constexpr,
    chunk: tl.constexpr,
    low_tile: tl.constexpr,
    low_columns: tl.constexpr,
    low_at_once: tl.constexpr,
    low_stages: tl.constexpr,
    tile: tl.constexpr,
    columns: tl.constexpr,
    at_once: tl.constexpr,
    biased: tl.constexpr,
    fetches: tl.constexpr,
    early: tl.constexpr,
):
    program = tl.program_id(0)
    if program < shrinking:
        _shrink(low_x, first, all_first, sums, ended, program, rows, depth, channels, low_blocks, tile,
                parts, chunk, low_tile, low_columns, low_at_once, low_stages, early)  # fmt: skip
    else:
        program -= shrinking
        blocks: tl.constexpr = (width + columns - 1) // columns
        first_column, first_row = program % blocks * columns, program // blocks * tile
        if fetches:
            fetch(matrix, first_column, columns, width, depth, early)
        wait_for_results(early)
        row, column = first_row + tl.arange(0, tile), first_column + tl.arange(0, columns)
        is_0, is_1 = first_column < end_0, first_column < end_1
        second = tl.where(is_0, second_0, tl.where(is_1, second_1, second_2))
        of_layer = tl.where(is_0, 0, tl.where(is_1, end_0, end_1))
        factor = _factor(second, column - of_layer, width - of_layer, rank, padded)
        total = tl.zeros([tile, columns], tl.float32)
        for at in range(0, depth, at_once):
            total = tl.dot(x.load([first_row, at]), weight.load([first_column, at]).T, total)
        if biased:
            total += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        _wait_for_sums(ended + program // blocks, tile // low_tile * low_blocks * parts, blocks, program % blocks == 0)
        first_channel = tl.where(is_0, 0, tl.where(is_1, rank, 2 * rank))
        kind: tl.constexpr = out.dtype.element_ty
        found = _adapted(total, factor, sums, scale, row, rows, first_channel, channels, parts, rank, padded, kind)
        target = out + row[:, None] * width + column[None, :]
        tl.store(target, found, mask=(row < rows)[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["rows", "depth", "shrinking", "low_blocks"])
def _gated_linear(
    x,  # descriptor of [rows, depth]
    weight,  # descriptor of [2 * width, depth]: of the gate, then of the other half
    low_x,  # descriptor of x, for programs that multiply with A
    first,  # descriptor of [channels, depth]: A of both
    matrix,  # the weight
    all_first,  # A
    second_0,  # [width, rank]: B of the gate
    second_1,  # of the other half
    sums,  # [parts, rows, channels]: x A.T, or its chunks in float32
    ended,  # [tiles of rows]: zeros before and after
    out,  # [rows, width]
    scale,
    rows,
    depth,
    shrinking,  # programs that multiply with A
    low_blocks,
    width: tl.constexpr,
    channels: tl.constexpr,
    rank: tl.constexpr,
    padded: tl.constexpr,
    parts: tl.constexpr,
    chunk: tl.constexpr,
    low_tile: tl.constexpr,
    low_columns: tl.constexpr,
    low_at_once: tl.constexpr,
    low_stages: tl.constexpr,
    tile: tl.constexpr,
    columns: tl.constexpr,
    at_once: tl.constexpr,
    gelu: tl.constexpr,
    fetches: tl.constexpr,
    early: tl.constexpr,
):
    program = tl.program_id(0)
    if program < shrinking:
        _shrink(low_x, first, all_first, sums, ended, program, rows, depth, channels, low_blocks, tile,
                parts, chunk, low_tile, low_columns, low_at_once, low_stages, early)  # fmt: skip
    else:
        program -= shrinking
        blocks: tl.constexpr = (width + columns - 1) // columns
        first_column, first_row = program % blocks * columns, program // blocks * tile
        if fetches:
            fetch(matrix, first_column, columns, 2 * width, depth, early)
            fetch(matrix, width + first_column, columns, 2 * width, depth, early)
        wait_for_results(early)
        row, column = first_row + tl.arange(0, tile), first_column + tl.arange(0, columns)
        gate = tl.zeros([tile, columns], tl.float32)
        up = tl.zeros([tile, columns], tl.float32)
        for at in range(0, depth, at_once):
            part = x.load([first_row, at])
            gate = tl.dot(part, weight.load([first_column, at]).T, gate)
            up = tl.dot(part, weight.load([width + first_column, at]).T, up)
        kind: tl.constexpr = out.dtype.element_ty
        _wait_for_sums(ended + program // blocks, tile // low_tile * low_blocks * parts, blocks, program % blocks == 0)
        factor = _factor(second_0, column, width, rank, padded)
        gate = _adapted(gate, factor, sums, scale, row, rows, 0, channels, parts, rank, padded, kind)
        factor = _factor(second_1, column, width, rank, padded)
        up = _adapted(up, factor, sums, scale, row, rows, rank, channels, parts, rank, padded, kind)
        found = activated(gate.to(tl.float32), up.to(tl.float32), kind, gelu)
        target = out + row[:, None] * width + column[None, :]
        tl.store(target, found, mask=(row < rows)[:, None] & (column < width)[None, :])


def takes(x: Tensor, weight: Tensor, adapters: Adapters) -> bool:
    """Whether the product is one for this kernel."""
    tile = tile_of(x, weight)
    return tile is not None and _fits(x, weight, adapters, tile)


def takes_gated(x: Tensor, weight: Tensor, adapters: Adapters) -> bool:
    """Whether both halves of a gated MLP are to be computed by this kernel."""
    tile = gated_tile(x, weight)
    return tile is not None and len(adapters.seconds) == 2 and _fits(x, weight, adapters, tile)


def _fits(x: Tensor, weight: Tensor, adapters: Adapters, tile: Tile) -> bool:
    """Whether each program has columns of one layer, all of which have adapters of a rank that it has room for."""
    widths = [len(second) for second in adapters.seconds]
    is_even = all(one % tile.columns == 0 for one in widths[:-1]) and sum(widths) == len(weight)
    fits = (
        is_even
        and len(x) <= MOST_ROWS
        and adapters.rank <= MOST_RANK
        and can_load(x, weight)
        and can_load(x, adapters.first)
    )
    return fits and all(second.is_contiguous() for second in adapters.seconds)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Adapters) -> Tensor:
    """x [T, K] @ weight.T [K, N] + bias [N] with what the adapters of all its layers add, for what this kernel
    `takes`."""
    tile = tile_of(x, weight)
    assert tile is not None
    (rows, depth), width = x.shape, len(weight)
    shrink, programs = _shrink_tile(tile, 1, rows, width, depth, len(adapters.first), processors(x.device))
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    sums = _sums(x, shrink, len(adapters.first))
    seconds = [*adapters.seconds, *[adapters.seconds[0]] * (LAYERS - len(adapters.seconds))]
    ends = [*adapters.columns[1:], *[width] * (LAYERS - len(adapters.seconds))]
    early = starts_early(x)
    _linear[(shrink.programs + programs,)](
        *_descriptors(x, weight, adapters.first, tile, shrink),
        weight, adapters.first, out if bias is None else bias, *seconds, sums, _ended(x.device), out,
        adapters.scale, rows, depth, shrink.programs, shrink.blocks, width, *ends,
        *_sizes(adapters, shrink), tile.rows, tile.columns, tile.depth, bias is not None, depth >= FETCHED, early,
        num_warps=tile.warps, num_stages=tile.stages, **launch_options(early),
    )  # fmt: skip
    return out


def gated_linear(x: Tensor, weight: Tensor, kind: Activation, adapters: Adapters) -> Tensor:
    """`activate(linear(x, weight, None, adapters), kind)`, for what this kernel `takes_gated`."""
    tile = gated_tile(x, weight)
    assert tile is not None
    (rows, depth), width = x.shape, len(weight) // 2
    shrink, programs = _shrink_tile(tile, 2, rows, width, depth, len(adapters.first), processors(x.device))
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    sums = _sums(x, shrink, len(adapters.first))
    early = starts_early(x)
    _gated_linear[(shrink.programs + programs,)](
        *_descriptors(x, weight, adapters.first, tile, shrink),
        weight, adapters.first, *adapters.seconds, sums, _ended(x.device), out,
        adapters.scale, rows, depth, shrink.programs, shrink.blocks, width,
        *_sizes(adapters, shrink), tile.rows, tile.columns, tile.depth, kind == "gelu_tanh", depth >= FETCHED,
        early, num_warps=tile.warps, num_stages=tile.stages, **launch_options(early), **UNFUSED,
    )  # fmt: skip
    return out


def _sums(x: Tensor, shrink: _ShrinkTile, channels: int) -> Tensor:
    """Where x A.T is written, or its chunks."""
    dtype = x.dtype if shrink.parts == 1 else torch.float32
    return torch.empty((shrink.parts, len(x), channels), dtype=dtype, device=x.device)


def _descriptors(
    x: Tensor, weight: Tensor, first: Tensor, tile: Tile, shrink: _ShrinkTile
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """Of x and the weight, and of x and A."""
    of_product = [TensorDescriptor.from_tensor(x, [tile.rows, tile.depth])]
    of_product.append(TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]))
    of_low = TensorDescriptor.from_tensor(x, [shrink.rows, shrink.depth])
    return *of_product, of_low, TensorDescriptor.from_tensor(first, [shrink.columns, shrink.depth])


def _sizes(adapters: Adapters, shrink: _ShrinkTile) -> tuple[int, ...]:
    """What both kernels have in common of their constants."""
    padded = power_of_2(adapters.rank)
    sizes = len(adapters.first), adapters.rank, padded, shrink.parts, shrink.chunk
    return *sizes, shrink.rows, shrink.columns, shrink.depth, shrink.stages


@cache
def _shrink_tile(
    tile: Tile, halves: int, rows: int, width: int, depth: int, channels: int, processors: int
) -> tuple[_ShrinkTile, int]:
    """(what multiplies with A beside programs with so many tiles each, how many of those there are)."""
    tiles = ceil_div(rows, tile.rows)
    programs = tiles * ceil_div(width, tile.columns)
    shared = 2 * (tile.rows + halves * tile.columns) * tile.depth * tile.stages
    room = max(1, SHARED // shared) * processors - programs
    height = min(64, tile.rows)
    chunk = chunk_size(depth)
    parts = 1 if halves == 2 else ceil_div(depth, chunk)  # Two products leave no registers for chunks to add.
    high, columns = parts * tiles * tile.rows // height, 16
    while high * ceil_div(channels, columns) > room and columns < min(channels, 128):
        columns *= 2
    stage = 2 * (height + columns)  # bytes for each number of the inner dimension
    at_once = next((one for one in (256, 128) if 4 * one * stage <= shared), 64)
    stages = max(2, min(6, shared // (at_once * stage)))
    blocks = ceil_div(channels, columns)
    return _ShrinkTile(height, columns, at_once, stages, chunk, parts, blocks, high * blocks), programs


@cache
def _ended(device: torch.device) -> Tensor:
    """Counts for the tiles of rows of a launch, which each launch leaves as they were. Launches follow each other."""
    return torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)
