"""Adapters (LoRA) beside a matmul as two Triton kernels: `shrink` is x A.T for all layers with the same input, and
`expand` adds what follows from it to their products, in place. Decode, prefill and training run the same programs.

A row has the same bits among few rows as among many: a program always has 64 rows, whatever number of them there are,
and the inner dimension is summed in two chunks whose size follows from that dimension alone. With few rows each chunk
has a program of its own, and the program that ends last adds them up. With many rows one program sums both. The order
is the same.

x A.T of few rows runs beside a matmul, on the few multiprocessors that this leaves. There a Hopper GPU loads by
descriptors, of which more are under way.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from ebbtide.model.launch import Launcher
from ebbtide.model.linear_kernels import MOST_ROWS, can_load
from ebbtide.system.gpu import HOPPER, generation
from ebbtide.system.units import ceil_div

ROWS, COLUMNS = 64, 64  # of a program
DEPTH, STAGES = 128, 3  # of x and of A at once: 96 KiB, which the smaller GPUs have
CHUNK, CHUNKS = 256, 2  # The inner dimension is summed in two chunks, the first a multiple of so many numbers.
FEW = 1024  # rows: up to here each chunk has a program
LAYERS = 3  # that have the same input, at most
MOST_BLOCKS = 64  # of channels: 4,096 of them
MOST_COLUMNS, LOADS = 128, 4  # by descriptors: columns of a program, and how many loads of it are under way
SHARED = 200 * 1024  # bytes of shared memory for these loads


class Adapters(NamedTuple):
    """The adapters of layers with the same input."""

    first: Tensor  # [adapters x rank, K]: A of all
    seconds: Sequence[Tensor]  # [width, rank] each: B, three at most
    columns: Sequence[int]  # where the product of each adapter's layer begins
    scale: float

    @property
    def rank(self) -> int:
        return self.seconds[0].shape[1]


@triton.jit(do_not_specialize=["rows", "chunks"])
def _shrink(
    x,  # [rows, depth]
    first,  # [channels, depth]: A of all layers
    sums,  # [parts, rows, channels] float32: of each program's chunks, where there are several parts
    ended,  # [tiles x wide]: how many parts have ended; zeros before and after
    low,  # [rows, channels]
    rows,
    chunks,  # of a program
    parts: tl.constexpr,
    depth: tl.constexpr,
    channels: tl.constexpr,
    chunk: tl.constexpr,
    tile: tl.constexpr,
    columns: tl.constexpr,
    at_once: tl.constexpr,
):
    tiles, wide = tl.cdiv(rows, tile), tl.cdiv(channels, columns)
    program = tl.program_id(0)
    part, block = program // (tiles * wide), program % (tiles * wide)
    row = (block % tiles * tile + tl.arange(0, tile)).to(tl.int64)
    channel, place = block // tiles * columns + tl.arange(0, columns), tl.arange(0, at_once)
    is_row, is_channel = row < rows, channel < channels
    begin = part * chunks * chunk
    total = tl.zeros([tile, columns], tl.float32)
    for start in range(begin, tl.minimum(begin + chunks * chunk, depth), chunk):
        found = tl.zeros([tile, columns], tl.float32)
        for at in range(start, tl.minimum(start + chunk, depth), at_once):
            inside = (at + place < depth)[None, :]
            of_x = x + row[:, None] * depth + (at + place)[None, :]
            of_first = first + channel[:, None] * depth + (at + place)[None, :]
            some = tl.load(of_x, mask=is_row[:, None] & inside, other=0.0)
            found = tl.dot(some, tl.load(of_first, mask=is_channel[:, None] & inside, other=0.0).T, found)
        total += found
    where, real = row[:, None] * channels + channel[None, :], is_row[:, None] & is_channel[None, :]
    if parts == 1:
        tl.store(low + where, total.to(low.dtype.element_ty), mask=real)
    else:
        size = tl.cast(rows, tl.int64) * channels
        tl.store(sums + part * size + where, total, mask=real)
        tl.debug_barrier()  # All threads have stored before one says so.
        if tl.atomic_add(ended + block, 1, sem="acq_rel") == parts - 1:
            total = tl.zeros([tile, columns], tl.float32)
            for one in tl.static_range(parts):
                total += tl.load(sums + one * size + where, mask=real, other=0.0, cache_modifier=".cg")
            tl.store(low + where, total.to(low.dtype.element_ty), mask=real)
            tl.store(ended + block, 0)


@triton.jit
def shrink_chunk(
    x, first, matrix, sums, part, first_row, first_channel, rows, depth, channels,
    parts: tl.constexpr, chunk: tl.constexpr, tile: tl.constexpr, columns: tl.constexpr, at_once: tl.constexpr,
    stages: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Multiplies some rows of x with a chunk of some rows of A, or with both chunks if there is one part. `x`, `first`:
    descriptors; `matrix`: A; `sums`: [parts, rows, channels]. `depth` is no constant: of a loop that it knows to run
    once, Triton makes a product that begins with what is added to it, which is another order."""
    channel, begin = first_channel + tl.arange(0, columns), part * chunk
    place = matrix + tl.minimum(channel, channels - 1).to(tl.int64) * depth + begin
    load_into_cache(tl.where(depth - begin >= 256, place, matrix).to(tl.int64), early & (parts * chunk > 256))
    wait_for_results(early)
    total = tl.zeros([tile, columns], tl.float32)
    for at in tl.range(begin, tl.minimum(begin + chunk, depth), at_once, num_stages=stages):
        total = tl.dot(x.load([first_row, at]), first.load([first_channel, at]).T, total)
    if parts == 1:  # The other chunk, if there is one.
        found = tl.zeros([tile, columns], tl.float32)
        for at in tl.range(chunk, depth, at_once, num_stages=stages):
            found = tl.dot(x.load([first_row, at]), first.load([first_channel, at]).T, found)
        total += found
    row = first_row + tl.arange(0, tile)
    target = sums + (part * rows + row)[:, None] * channels + channel[None, :]
    tl.store(target, total.to(sums.dtype.element_ty), mask=(row < rows)[:, None] & (channel < channels)[None, :])


@triton.jit(do_not_specialize=["rows", "depth"])
def _shrink_few(
    x,  # descriptor of [rows, depth]
    first,  # descriptor of [channels, depth]: A of all layers
    matrix,  # A
    sums,  # [parts, rows, channels] float32: of each program's chunk
    ended,  # [tiles x blocks]: how many parts have ended; zeros before and after
    low,  # [rows, channels]
    rows,
    depth,
    parts: tl.constexpr,
    channels: tl.constexpr,
    chunk: tl.constexpr,
    tile: tl.constexpr,
    columns: tl.constexpr,
    at_once: tl.constexpr,
    stages: tl.constexpr,
):
    blocks: tl.constexpr = (channels + columns - 1) // columns
    program = tl.program_id(0)
    part, block = program % parts, program // parts
    first_row, first_channel = block // blocks * tile, block % blocks * columns
    shrink_chunk(x, first, matrix, sums, part, first_row, first_channel, rows, depth, channels,
                 parts, chunk, tile, columns, at_once, stages, False)  # fmt: skip
    tl.debug_barrier()  # All threads have stored before one says so.
    if tl.atomic_add(ended + block, 1, sem="acq_rel") == parts - 1:
        row, channel = first_row + tl.arange(0, tile), first_channel + tl.arange(0, columns)
        where, real = row[:, None] * channels + channel[None, :], (row < rows)[:, None] & (channel < channels)[None, :]
        total = tl.zeros([tile, columns], tl.float32)
        for one in tl.static_range(parts):
            total += tl.load(sums + one * rows * channels + where, mask=real, other=0.0, cache_modifier=".cg")
        tl.store(low + where, total.to(low.dtype.element_ty), mask=real)
        tl.store(ended + block, 0)


@triton.jit(do_not_specialize=["rows"])
def _expand(
    products,  # [rows, stride]: of all layers, side by side
    low,  # [rows, channels]
    second_0,  # [width_0, rank]: B of each layer that has an adapter
    second_1,
    second_2,
    rows,
    scale,
    width_0: tl.constexpr,
    width_1: tl.constexpr,
    width_2: tl.constexpr,
    column_0: tl.constexpr,  # where the layer's product begins
    column_1: tl.constexpr,
    column_2: tl.constexpr,
    stride: tl.constexpr,
    channels: tl.constexpr,
    rank: tl.constexpr,
    tile: tl.constexpr,
    columns: tl.constexpr,
    at_once: tl.constexpr,
    early: tl.constexpr,
):
    wait_for_results(early)
    tiles, program = tl.cdiv(rows, tile), tl.program_id(0)
    block, after_0 = program // tiles, tl.cdiv(width_0, columns)
    after_1 = after_0 + tl.cdiv(width_1, columns)
    is_0, is_1 = block < after_0, block < after_1
    second = tl.where(is_0, second_0, tl.where(is_1, second_1, second_2))
    width = tl.where(is_0, width_0, tl.where(is_1, width_1, width_2))
    begin = tl.where(is_0, column_0, tl.where(is_1, column_1, column_2))
    first_channel = tl.where(is_0, 0, tl.where(is_1, rank, 2 * rank))
    block -= tl.where(is_0, 0, tl.where(is_1, after_0, after_1))
    row = (program % tiles * tile + tl.arange(0, tile)).to(tl.int64)
    column, place = block * columns + tl.arange(0, columns), tl.arange(0, at_once)
    is_row, is_column = row < rows, column < width
    target, mask = products + row[:, None] * stride + (begin + column)[None, :], is_row[:, None] & is_column[None, :]
    before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros([tile, columns], tl.float32)
    for at in tl.static_range(0, rank, at_once):
        inside = (at + place < rank)[None, :]
        of_low = low + row[:, None] * channels + (first_channel + at + place)[None, :]
        of_second = second + column[:, None] * rank + (at + place)[None, :]
        some = tl.load(of_low, mask=is_row[:, None] & inside, other=0.0)
        factor = tl.load(of_second, mask=is_column[:, None] & inside, other=0.0)
        total = tl.dot(some, factor.T, total)
    tl.store(target, tl.fma(total, scale, before).to(products.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _expand_gated(
    products,  # [rows, 2 * width]: of the gate, then of the other half
    low,  # [rows, 2 * rank]
    second_0,  # [width, rank]: B of the gate
    second_1,  # of the other half
    out,  # [rows, width]
    rows,
    scale,
    width: tl.constexpr,
    rank: tl.constexpr,
    tile: tl.constexpr,
    columns: tl.constexpr,
    at_once: tl.constexpr,
    gelu: tl.constexpr,
    early: tl.constexpr,
):
    wait_for_results(early)
    tiles, program = tl.cdiv(rows, tile), tl.program_id(0)
    row = (program % tiles * tile + tl.arange(0, tile)).to(tl.int64)
    column, place = program // tiles * columns + tl.arange(0, columns), tl.arange(0, at_once)
    is_row, is_column = row < rows, column < width
    of_gate, mask = products + row[:, None] * 2 * width + column[None, :], is_row[:, None] & is_column[None, :]
    gate = tl.load(of_gate, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(of_gate + width, mask=mask, other=0.0).to(tl.float32)
    to_gate, to_up = tl.zeros([tile, columns], tl.float32), tl.zeros([tile, columns], tl.float32)
    for at in tl.static_range(0, rank, at_once):
        inside = (at + place < rank)[None, :]
        of_low = low + row[:, None] * 2 * rank + (at + place)[None, :]
        of_second = column[:, None] * rank + (at + place)[None, :]
        factor = tl.load(second_0 + of_second, mask=is_column[:, None] & inside, other=0.0)
        to_gate = tl.dot(tl.load(of_low, mask=is_row[:, None] & inside, other=0.0), factor.T, to_gate)
        factor = tl.load(second_1 + of_second, mask=is_column[:, None] & inside, other=0.0)
        to_up = tl.dot(tl.load(of_low + rank, mask=is_row[:, None] & inside, other=0.0), factor.T, to_up)
    kind: tl.constexpr = out.dtype.element_ty
    gate, up = tl.fma(to_gate, scale, gate).to(kind), tl.fma(to_up, scale, up).to(kind)
    found = activated(gate.to(tl.float32), up.to(tl.float32), kind, gelu)
    tl.store(out + row[:, None] * width + column[None, :], found, mask=mask)


_launch_shrink, _launch_expand = Launcher(_shrink, num_stages=STAGES), Launcher(_expand, dependent=True, joins=True)
_launch_expand_gated = Launcher(_expand_gated, dependent=True, joins=True, **UNFUSED)


@cache
def _ended(device: torch.device) -> Tensor:
    """Zeros for the tiles of a launch, which each launch leaves as they were. Launches follow each other."""
    return torch.zeros(ceil_div(FEW, ROWS) * MOST_BLOCKS, dtype=torch.int32, device=device)


def shrink(x: Tensor, first: Tensor) -> Tensor:
    """x [T, K] @ first.T [K, channels] for `expand`, of all adapters."""
    x, first = x.contiguous(), first.contiguous()
    if _are_few(x, first):
        return _shrink_by_descriptors(x, first)
    (rows, depth), channels = x.shape, len(first)
    chunk = chunk_size(depth)
    chunks, wide = ceil_div(depth, chunk), min(COLUMNS, power_of_2(channels))
    blocks = ceil_div(channels, wide)
    parts = chunks if rows <= FEW and blocks <= MOST_BLOCKS else 1
    low = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    sums = low if parts == 1 else torch.empty((parts, rows, channels), dtype=torch.float32, device=x.device)
    if rows:
        _launch_shrink(
            ceil_div(rows, ROWS) * blocks * parts,
            (x, first, sums, _ended(x.device), low),
            (rows, chunks // parts),
            *(parts, depth, channels, chunk, ROWS, wide, DEPTH),
            warps=4,
        )
    return low


def _are_few(x: Tensor, first: Tensor) -> bool:
    """Whether the rows are so few that they are loaded by descriptors, in two chunks, on a GPU that does."""
    fits = len(x) <= MOST_ROWS and len(first) <= MOST_BLOCKS * COLUMNS and x.shape[1] > CHUNK
    return fits and x.itemsize == 2 and _is_hopper(x) and can_load(x, first)


def _is_hopper(x: Tensor) -> bool:
    return x.is_cuda and generation(x.device) == HOPPER


def _shrink_by_descriptors(x: Tensor, first: Tensor) -> Tensor:
    """`shrink` of few rows."""
    (rows, depth), channels = x.shape, len(first)
    wide = min(MOST_COLUMNS, power_of_2(channels))
    at_once = 256 if LOADS * 256 * 2 * (ROWS + wide) <= SHARED else 128
    low = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    sums = torch.empty((CHUNKS, rows, channels), dtype=torch.float32, device=x.device)
    _shrink_few[(ceil_div(rows, ROWS) * ceil_div(channels, wide) * CHUNKS,)](
        TensorDescriptor.from_tensor(x, [ROWS, at_once]), TensorDescriptor.from_tensor(first, [wide, at_once]),
        first, sums, _ended(x.device), low, rows, depth, CHUNKS, channels, chunk_size(depth), ROWS, wide, at_once,
        LOADS, num_warps=4, num_stages=LOADS,
    )  # fmt: skip
    return low


def expand(
    products: Tensor,  # [T, N]: of all layers, side by side
    low: Tensor,  # [T, adapters x rank]: of `shrink`
    seconds: Sequence[Tensor],  # [width, rank] each: B of all adapters, three at most
    columns: Sequence[int],  # where the product of each adapter's layer begins
    scale: float,
) -> None:
    """Adds scale * low B.T to the products of the layers that have an adapter, in place."""
    (rows, channels), rank = low.shape, seconds[0].shape[1]
    if not rows:
        return
    seconds = [second.contiguous() for second in seconds]
    widths, missing = [len(second) for second in seconds], LAYERS - len(seconds)
    _launch_expand(
        ceil_div(rows, ROWS) * sum(ceil_div(width, COLUMNS) for width in widths),
        (products, low, *seconds, *[seconds[0]] * missing),
        (rows, scale),
        *(*widths, *[0] * missing, *columns, *[0] * missing, products.stride(0), channels, rank),
        *(ROWS, COLUMNS, min(DEPTH, power_of_2(rank))),
        warps=4,
    )


def expand_gated(products: Tensor, low: Tensor, seconds: Sequence[Tensor], scale: float, kind: Activation) -> Tensor:
    """What `activate` makes of a gated MLP's products [T, 2 N], both halves of which have adapters, after `expand`:
    [T, N]."""
    (rows, width), rank = (len(products), products.shape[1] // 2), seconds[0].shape[1]
    out = torch.empty((rows, width), dtype=products.dtype, device=products.device)
    if rows:
        _launch_expand_gated(
            ceil_div(rows, ROWS) * ceil_div(width, COLUMNS),
            (products, low, *(second.contiguous() for second in seconds), out),
            (rows, scale),
            *(width, rank, ROWS, COLUMNS, min(DEPTH, power_of_2(rank)), kind == "gelu_tanh"),
            warps=4,
        )
    return out


def chunk_size(depth: int) -> int:
    """How many numbers of the inner dimension are summed by themselves."""
    return CHUNK * ceil_div(depth, CHUNKS * CHUNK)


def power_of_2(size: int) -> int:
    """The least size of a program's tile that holds so many: tensor cores multiply 16 at least."""
    return max(16, 1 << (size - 1).bit_length())
