"""Quantized matrices (`model.base`) on a GPU as Triton kernels: codes to numbers, and the products of few rows, in
which codes become numbers on their way into the matmul.

A product adds in the order in which cuBLAS adds the products of the numbers without split-K (linear_kernels.py), and
has its bits: scales of rows are powers of 2, and change no bit of a sum but its exponent.

On Hopper a matmul reads the numbers from registers while the program goes on. Triton splits the only matmul of a loop
into several, and lets all but one of them run while the next round writes to their registers (its issue 9433, in 3.6
and before): now and then numbers are wrong. Of several matmuls it waits for each at the next one, so loops have two or
more, and make the numbers of one after the one before it. tests/gpu/test_compiled_kernels.py looks for such writes in
compiled code.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.model.quantized_sizes import MOST_ROWS
from ebbtide.system.gpu import capability, processors

DEPTH = 64  # of x that a program multiplies at once in 8 bits; in 4 bits it is a group
GROUPS = 4  # whose bytes are a word
AT_ONCE = 4096  # Numbers that a program makes of codes.
EXPONENTS_APART = tl.constexpr(2.0**120)  # Exponents count from 127 in float32, and from 7 in e4m3.


class Tile(NamedTuple):
    """What a program of a matmul computes, and how."""

    rows: int
    columns: int
    warps: int
    stages: int


@triton.jit
def _numbers(codes, of_group):
    """(code - zero) x factor, in bfloat16, in which a GPU computes two numbers at once, and which has all of them.
    `of_group`: the byte of a group; what is above it does not matter."""
    # With these bits in front, 4 bits are 128 + their number in bfloat16: quicker than a conversion.
    numbers = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    zero = (of_group & 15 | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    factor = (of_group >> 4 & 15 | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True) - 127.0
    return (numbers - zero) * factor


@triton.jit
def _float8_numbers(codes, native: tl.constexpr):
    """The numbers of e4m3 codes, which are bytes. `native`: the GPU has an instruction for it."""
    if native:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    # The bits of sign, exponent and mantissa at their places in float32.
    bits = codes.to(tl.int32)
    return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * EXPONENTS_APART


@triton.jit
def _dequantize_float8(codes, scale, out, columns, at_once: tl.constexpr, native: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * at_once + tl.arange(0, at_once)
    inside = column < columns
    numbers = _float8_numbers(tl.load(codes + row * columns + column, mask=inside, other=0), native)
    numbers *= tl.load(scale + row).to(tl.float32)
    tl.store(out + row * columns + column, numbers.to(tl.bfloat16), mask=inside)


@triton.jit
def _dequantize_int4(codes, words, out, blocks, group: tl.constexpr, at_once: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * at_once + tl.arange(0, at_once)
    place = tl.arange(0, group)
    there = block < blocks
    word_at = words + row * (blocks + 1)
    scale = tl.load(word_at + blocks).to(tl.float32, bitcast=True)
    word = tl.load(word_at + block, mask=there)[:, None]
    for pair in tl.static_range(2):
        code_at = ((row * blocks + block) * 2 + pair)[:, None] * group + place[None, :]
        both = tl.load(codes + code_at, mask=there[:, None])
        of_pair = word >> (16 * pair)
        first = _numbers(both & 15, of_pair).to(tl.float32) * scale
        second = _numbers(both >> 4, of_pair >> 8).to(tl.float32) * scale
        target = out + ((row * blocks + block) * 4 + 2 * pair)[:, None] * group + place[None, :]
        tl.store(target, first.to(tl.bfloat16), mask=there[:, None])
        tl.store(target + group, second.to(tl.bfloat16), mask=there[:, None])


def dequantize(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    """Writes the numbers of codes to `out` [N, K], which is in bfloat16."""
    rows, width = codes.shape
    if codes.dtype != torch.uint8:
        grid = rows, triton.cdiv(width, AT_ONCE)
        _dequantize_float8[grid](codes.view(torch.uint8), scale, out, width, AT_ONCE, _has_float8(codes.device))
        return
    blocks, group = _blocks(codes, scale)
    at_once = min(AT_ONCE // (GROUPS * group), triton.next_power_of_2(blocks))
    _dequantize_int4[rows, triton.cdiv(blocks, at_once)](codes, _words(scale), out, blocks, group, at_once)


def _has_float8(device: torch.device) -> bool:
    """Whether kernels may convert from e4m3 by an instruction: GPUs before Ada and Hopper have none."""
    return device.type != "cuda" or capability(device) >= (8, 9)


def _blocks(codes: Tensor, scale: Tensor) -> tuple[int, int]:
    """(words of a row's groups, numbers of a group)."""
    blocks = scale.shape[1] // GROUPS - 1
    return blocks, 2 * codes.shape[1] // (GROUPS * blocks)


def _words(scale: Tensor) -> Tensor:
    """[N, blocks + 1]: the bytes of four groups as one number, which is loaded at once, and a row's scale."""
    return scale.view(torch.int32)


@triton.jit(do_not_specialize=["rows", "width", "stride"])
def _linear_float8(
    x,  # [rows, depth]
    codes,  # [width, depth], as bytes
    scale,  # [width]
    bias,  # [width]
    out,  # [rows, width], with `stride` numbers between the beginnings of rows
    rows,
    width,
    stride,
    depth: tl.constexpr,
    tile: tl.constexpr,
    columns: tl.constexpr,
    at_once: tl.constexpr,
    biased: tl.constexpr,
    native: tl.constexpr,
):
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    place = tl.arange(0, at_once)
    # Beyond the last row or column others are read, and nothing is written.
    code_at = codes + (column % width).to(tl.int64)[:, None] * depth + place[None, :]
    x_at = x + (row % rows)[None, :] * depth + place[:, None]
    total = tl.zeros([columns, tile], tl.float32)
    for at in range(0, depth, 2 * at_once):
        for half in tl.static_range(2):
            start = at + half * at_once
            if depth % (2 * at_once) == 0:
                found, numbers_of_x = tl.load(code_at + start), tl.load(x_at + start)
            else:
                inside = start + place < depth
                found = tl.load(code_at + start, mask=inside[None, :], other=0)
                numbers_of_x = tl.load(x_at + start, mask=inside[:, None], other=0.0)
            numbers = _float8_numbers(found, native).to(x.dtype.element_ty)
            total = tl.dot(numbers, numbers_of_x, total)
    there, near = (column < width)[:, None], (row < rows)[None, :]
    total *= tl.load(scale + column, mask=column < width, other=0.0).to(tl.float32)[:, None]
    if biased:
        total += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[:, None]
    tl.store(out + row[None, :] * stride + column[:, None], total.to(out.dtype.element_ty), mask=there & near)


@triton.jit(do_not_specialize=["rows", "width", "stride"])
def _linear_int4(
    x,  # [rows, depth]
    codes,  # [width, depth / 2]
    words,  # [width, blocks + 1]
    bias,  # [width]
    out,  # [rows, width], with `stride` numbers between the beginnings of rows
    rows,
    width,
    stride,
    blocks: tl.constexpr,  # of four groups
    tile: tl.constexpr,
    columns: tl.constexpr,
    group: tl.constexpr,
    biased: tl.constexpr,
):
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    place = tl.arange(0, group)
    # Beyond the last row or column others are read, and nothing is written.
    code_at = codes + (column % width).to(tl.int64)[:, None] * (2 * blocks * group) + place[None, :]
    word_at = words + (column % width)[:, None] * (blocks + 1)
    x_at = x + (row % rows)[None, :] * (4 * blocks * group) + place[:, None]
    total = tl.zeros([columns, tile], tl.float32)
    for block in range(0, blocks):
        word = tl.load(word_at + block)
        for pair in tl.static_range(2):
            both, of_pair = tl.load(code_at + (2 * block + pair) * group), word >> (16 * pair)
            first = _numbers(both & 15, of_pair).to(x.dtype.element_ty)
            total = tl.dot(first, tl.load(x_at + (4 * block + 2 * pair) * group), total)
            # Not before the first matmul, at which the one before it is waited for.
            second = _numbers(both >> 4, of_pair >> 8).to(x.dtype.element_ty)
            total = tl.dot(second, tl.load(x_at + (4 * block + 2 * pair + 1) * group), total)
    total *= tl.load(word_at + blocks).to(tl.float32, bitcast=True)
    there, near = (column < width)[:, None], (row < rows)[None, :]
    if biased:
        total += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[:, None]
    tl.store(out + row[None, :] * stride + column[:, None], total.to(out.dtype.element_ty), mask=there & near)


def takes(x: Tensor, codes: Tensor, scale: Tensor) -> bool:
    """Whether the product of x with these codes is one for this kernel. In 4 bits a group is to be as deep as a
    matmul instruction."""
    return (
        0 < len(x) <= MOST_ROWS
        and x.dtype == torch.bfloat16
        and x.is_contiguous()
        and (codes.dtype != torch.uint8 or _blocks(codes, scale)[1] >= 16)
    )


def linear(
    x: Tensor, codes: Tensor, scale: Tensor, *, bias: Tensor | None, out: Tensor, tile: Tile | None = None
) -> None:
    """Writes x [T, K] @ numbers.T [K, N] + bias [N], of what this kernel `takes`, to `out` [T, N], which may be columns
    of a wider tensor. `tile`: instead of that of `tile_of`; none changes a bit."""
    rows, width = len(x), len(codes)
    tile = tile or tile_of(rows, width, processors(x.device) if x.is_cuda else 1)
    grid = triton.cdiv(width, tile.columns), triton.cdiv(rows, tile.rows)
    given = out if bias is None else bias
    if codes.dtype != torch.uint8:
        _linear_float8[grid](
            x, codes.view(torch.uint8), scale, given, out, rows, width, out.stride(0), codes.shape[1], tile.rows,
            tile.columns, DEPTH, bias is not None, _has_float8(x.device), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    else:
        blocks, group = _blocks(codes, scale)
        _linear_int4[grid](
            x, codes, _words(scale), given, out, rows, width, out.stride(0), blocks, tile.rows, tile.columns, group,
            bias is not None, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def tile_of(rows: int, width: int, processors: int) -> Tile:
    """The tile of a product on a GPU with so many multiprocessors."""
    columns = 64
    tile = min(128, max(16, triton.next_power_of_2(rows)))
    blocks = triton.cdiv(width, columns)
    if tile == 128 and 2 * blocks * triton.cdiv(rows, tile) <= processors:
        tile = 64  # so that no more than half of the processors are idle
    # Where a processor has several programs, these wait for memory in turns, and need less of its own.
    return Tile(tile, columns, 4, 5 if blocks * triton.cdiv(rows, tile) <= processors else 3)
