"""Quantized matrices (`model.base`) on a GPU as Triton kernels: codes to numbers, and the products of few rows, in
which codes become numbers on their way into the matmul.

A product adds in the order in which cuBLAS adds the products of the numbers without split-K (linear_kernels.py), and
has its bits.

On Hopper a matmul reads the numbers from registers while the program goes on. Triton splits the only matmul of a loop
into several, and lets all but one of them run while the next round writes to their registers (its issue 9433, in 3.6
and before): now and then numbers are wrong. Of two matmuls it waits for both at the first one, so loops have two, and
make the numbers of the second after it. tests/gpu/test_compiled_kernels.py looks for such writes in compiled code.
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
AT_ONCE = 4096  # Numbers that a program makes of codes.
EXPONENTS_APART = tl.constexpr(2.0**120)  # Exponents count from 127 in float32, and from 7 in e4m3.


class Tile(NamedTuple):
    """What a program of a matmul computes, and how."""

    rows: int
    columns: int
    warps: int
    stages: int


@triton.jit
def _numbers(codes, word):
    """The numbers of 4-bit codes, in bfloat16. A word has the upper bits of a scale, and those of the code for 0. Both
    are exact in bfloat16, in which a GPU computes two numbers at once; the last rounding is the only one."""
    scale = (word >> 4 << 3).to(tl.int16).to(tl.bfloat16, bitcast=True)
    # With these bits in front, a code is 128 + code in bfloat16: quicker than a conversion.
    numbers = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    zero = (word & 15 | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return (numbers - zero) * scale


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
def _dequantize_int4(codes, words, out, pairs, group: tl.constexpr, at_once: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * at_once + tl.arange(0, at_once)
    place = tl.arange(0, group)
    there = pair < pairs
    both = tl.load(codes + (row * pairs + pair[:, None]) * group + place[None, :], mask=there[:, None])
    word = tl.load(words + row * pairs + pair, mask=there)[:, None]
    first, second = _numbers(both & 15, word & 0xFFFF), _numbers(both >> 4, (word >> 16) & 0xFFFF)
    target = out + (row * pairs + pair[:, None]) * 2 * group + place[None, :]
    tl.store(target, first, mask=there[:, None])
    tl.store(target + group, second, mask=there[:, None])


def dequantize(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    """Writes the numbers of codes to `out` [N, K], which is in bfloat16."""
    rows, width = codes.shape
    if codes.dtype != torch.uint8:
        grid = rows, triton.cdiv(width, AT_ONCE)
        _dequantize_float8[grid](codes.view(torch.uint8), scale, out, width, AT_ONCE, _has_float8(codes.device))
        return
    pairs = scale.shape[1] // 2
    group = width // pairs
    at_once = min(AT_ONCE // (2 * group), triton.next_power_of_2(pairs))
    _dequantize_int4[rows, triton.cdiv(pairs, at_once)](codes, _words(scale), out, pairs, group, at_once)


def _has_float8(device: torch.device) -> bool:
    """Whether kernels may convert from e4m3 by an instruction: GPUs before Ada and Hopper have none."""
    return device.type != "cuda" or capability(device) >= (8, 9)


def _words(scale: Tensor) -> Tensor:
    """[N, pairs]: the words of two groups as one number, which is loaded at once."""
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
    # A power of 2 changes no bit of a sum but its exponent.
    total *= tl.load(scale + column, mask=column < width, other=0.0).to(tl.float32)[:, None]
    if biased:
        total += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[:, None]
    tl.store(out + row[None, :] * stride + column[:, None], total.to(out.dtype.element_ty), mask=there & near)


@triton.jit(do_not_specialize=["rows", "width", "stride"])
def _linear_int4(
    x,  # [rows, depth]
    codes,  # [width, depth / 2]
    words,  # [width, pairs]
    bias,  # [width]
    out,  # [rows, width], with `stride` numbers between the beginnings of rows
    rows,
    width,
    stride,
    pairs: tl.constexpr,  # of groups
    tile: tl.constexpr,
    columns: tl.constexpr,
    group: tl.constexpr,
    biased: tl.constexpr,
):
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    place = tl.arange(0, group)
    # Beyond the last row or column others are read, and nothing is written.
    code_at = codes + (column % width).to(tl.int64)[:, None] * (pairs * group) + place[None, :]
    word_at = words + (column % width)[:, None] * pairs
    x_at = x + (row % rows)[None, :] * (2 * pairs * group) + place[:, None]
    total = tl.zeros([columns, tile], tl.float32)
    for pair in range(0, pairs):
        both, word = tl.load(code_at + pair * group), tl.load(word_at + pair)
        first = _numbers(both & 15, word & 0xFFFF).to(x.dtype.element_ty)
        total = tl.dot(first, tl.load(x_at + 2 * pair * group), total)
        # Not before the first matmul, at which the second one of the round before is waited for.
        second = _numbers(both >> 4, (word >> 16) & 0xFFFF).to(x.dtype.element_ty)
        total = tl.dot(second, tl.load(x_at + (2 * pair + 1) * group), total)
    there, near = (column < width)[:, None], (row < rows)[None, :]
    if biased:
        total += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[:, None]
    tl.store(out + row[None, :] * stride + column[:, None], total.to(out.dtype.element_ty), mask=there & near)


def takes(x: Tensor, codes: Tensor, group: int) -> bool:
    """Whether the product of x with these codes is one for this kernel. In 4 bits a group is to be as deep as a
    matmul instruction."""
    return (
        0 < len(x) <= MOST_ROWS
        and x.dtype == torch.bfloat16
        and x.is_contiguous()
        and (codes.dtype != torch.uint8 or group >= 16)
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
        pairs = scale.shape[1] // 2
        _linear_int4[grid](
            x, codes, _words(scale), given, out, rows, width, out.stride(0), pairs, tile.rows, tile.columns,
            codes.shape[1] // pairs, bias is not None, num_warps=tile.warps, num_stages=tile.stages,
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
