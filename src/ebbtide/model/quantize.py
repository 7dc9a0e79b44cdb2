"""Matrices in 8 or 4 bits: codes with scales, which are turned back into numbers where they are multiplied.

    float8   e4m3
    int4     codes from 0 to 15, and a byte for each group of up to 32 numbers of a row: 4 bits of a factor from 1 to
             16, and 4 of the code that is zero, which is within the range of every group. Two groups share the bytes
             of their codes, the first in the low bits, the second in the high bits

A row has a scale, which is a power of 2. A number of the base is code x scale, or (code - zero) x factor x scale: a
bfloat16, without any rounding. Codes are the same whatever device they were made on: sums are in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ebbtide.config.model import BaseKind
from ebbtide.model.linear import add_matmul, linear
from ebbtide.model.linear_sizes import ALIGNED
from ebbtide.model.quantized_sizes import group_size, slice_rows
from ebbtide.system.side_stream import begin_beside

AT_ONCE = {"cuda": 2**22, "cpu": 2**20}  # Numbers that are quantized at once: on a CPU, what its caches hold.
LARGEST_FLOAT8 = 448.0
LARGEST_CODE = 15
LARGEST_FACTOR = 16
SCALE_BYTES = 4
LEAST_SCALE = 2.0**-126
"""Smaller numbers are not exact on every device."""


class Quantized(NamedTuple):
    """A matrix [N, K]."""

    codes: Tensor  # float8 [N, K], or uint8 [N, K / 2]
    scale: Tensor  # bfloat16 [N, 1], or uint8 [N, groups + 4]: the bytes of a row's groups, and of its scale in float32

    @property
    def columns(self) -> int:
        return self.codes.shape[1] * (2 if self.codes.dtype == torch.uint8 else 1)

    def rows(self, which: slice) -> Quantized:
        return Quantized(self.codes[which], self.scale[which])

    @property
    def group(self) -> int:
        """Numbers of a row that share a factor, of codes of 4 bits."""
        return self.columns // (self.scale.shape[1] - SCALE_BYTES)


def product(x: Tensor, matrix: Quantized, bias: Tensor | None = None) -> Tensor:
    """x [..., K] @ matrix.T [K, N] + bias [N]. Autograd keeps the codes, not the numbers."""
    found: Tensor = _Product.apply(x, bias, *matrix)  # type: ignore[no-untyped-call]
    return found


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.matrix = Quantized(codes, scale)
        return functional.linear(x, dequantize(ctx.matrix, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] @ dequantize(ctx.matrix, grads[0].dtype), None, None, None


def quantized_linear(
    x: Tensor, matrices: Sequence[Quantized], bias: Tensor | None = None, *, may_branch: bool = False
) -> Tensor:
    """x [T, K] @ matrix.T [K, N] + bias [N], of matrices that are one below the other. On a GPU codes of few rows'
    products become numbers inside the matmul; its bits are those of many rows. `may_branch`: the kernel after it may
    have to wait for several in a CUDA graph, and is not started early (model/launch.py)."""
    found = _product_of_codes(x, matrices, bias, may_branch=may_branch)
    return linear(x, dequantize_all(matrices, x.dtype), bias) if found is None else found


def _product_of_codes(
    x: Tensor, matrices: Sequence[Quantized], bias: Tensor | None, *, may_branch: bool = False
) -> Tensor | None:
    """The product, where there is a kernel that makes numbers inside the matmul."""
    if not x.is_cuda:
        return None
    from ebbtide.model import quantized_kernels  # It needs triton, which comes with torch on a GPU.

    if not all(quantized_kernels.takes(x, *matrix) for matrix in matrices):
        return None
    rows = [len(matrix.codes) for matrix in matrices]
    out = x.new_empty((len(x), sum(rows)))
    biases = [None] * len(rows) if bias is None else bias.split(rows)

    def begin(matrix: Quantized, bias: Tensor | None, part: Tensor) -> Callable[[], None]:
        """Begins a matrix's product. Returns a function that ends it."""
        work = partial(quantized_kernels.linear, x, *matrix, bias=bias, out=part)
        return begin_beside(work, x.device)[1] if may_branch else work

    first, *others = zip(matrices, biases, out.split(rows, 1), strict=True)
    joins = [begin(*other) for other in others]  # Beside the first, as none alone has programs for a whole GPU.
    quantized_kernels.linear(x, *first[0], bias=first[1], out=first[2])
    for join in joins:
        join()
    return out


def linear_in_slices(x: Tensor, matrix: Quantized, bias: Tensor | None = None) -> Tensor:
    """`quantized_linear` of a matrix of so many rows that no more than a slice of them is to be there in numbers, in
    the backward neither."""
    found: Tensor = _ProductInSlices.apply(x, bias, *matrix)  # type: ignore[no-untyped-call]
    return found


class _ProductInSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.matrix = matrix = Quantized(codes, scale)
        if (found := _product_of_codes(x, [matrix], bias)) is not None:
            return found
        out = x.new_empty(len(x), len(codes))
        is_direct = bias is None and len(x) > 1 and len(codes) % ALIGNED == 0
        for rows in _slices(matrix):
            numbers = dequantize(matrix.rows(rows), x.dtype)
            if is_direct:
                torch.mm(x, numbers.t(), out=out[:, rows])
            else:  # A matmul that writes to unaligned rows would be another one.
                out[:, rows] = linear(x, numbers, None if bias is None else bias[rows])
            del numbers  # so that the next slice's are not made beside them
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return product_in_slices(grads[0], ctx.matrix), None, None, None


@torch.no_grad()
def product_in_slices(grad: Tensor, matrix: Quantized) -> Tensor:
    """grad [T, N] @ matrix [N, K], with no more than a slice of the matrix in numbers; the slices' products are added
    in float32."""
    total = torch.zeros((len(grad), matrix.columns), dtype=torch.float32, device=grad.device)
    for rows in _slices(matrix):
        numbers = dequantize(matrix.rows(rows), grad.dtype)
        add_matmul(total, grad[:, rows], numbers)
        del numbers
    return total.to(grad.dtype)


def _slices(matrix: Quantized) -> list[slice]:
    """The rows of a matrix in slices, each of which begins where matmuls read and write whole cache lines."""
    each = slice_rows(matrix.columns)
    return [slice(start, start + each) for start in range(0, len(matrix.codes), each)]


def dequantize(matrix: Quantized, dtype: torch.dtype) -> Tensor:
    """The numbers of a matrix [N, K]."""
    return dequantize_all([matrix], dtype)


@torch.no_grad()
def dequantize_all(matrices: Sequence[Quantized], dtype: torch.dtype) -> Tensor:
    """The numbers of matrices that are one below the other [N, K]."""
    rows = [len(matrix.codes) for matrix in matrices]
    first = matrices[0]
    found = torch.empty((sum(rows), first.columns), dtype=torch.bfloat16, device=first.codes.device)
    for matrix, part in zip(matrices, found.split(rows), strict=True):
        _write_numbers(matrix, part)
    return found.to(dtype)


def _write_numbers(matrix: Quantized, out: Tensor) -> None:
    codes, scale = matrix
    if codes.is_cuda:
        from ebbtide.model import quantized_kernels

        quantized_kernels.dequantize(codes, scale, out)
    elif codes.dtype != torch.uint8:
        torch.mul(codes.bfloat16(), scale, out=out)
    else:
        pairs = codes.view(len(codes), -1, 1, matrix.group)
        groups = torch.cat([pairs & LARGEST_CODE, pairs >> 4], 2).flatten(1, 2)
        of_groups = scale[:, :-SCALE_BYTES, None]
        factor = ((of_groups >> 4) + 1) * scale[:, -SCALE_BYTES:].view(torch.float32)[..., None]
        out.copy_(((groups.int() - (of_groups & LARGEST_CODE)) * factor).flatten(1))


@torch.no_grad()
def quantize(weight: Tensor, kind: BaseKind) -> Quantized:
    """The codes of a matrix [N, K], on its device, whatever type it was loaded in: those of its numbers in bfloat16."""
    rows = max(1, AT_ONCE[weight.device.type] // weight.shape[1])
    function = _to_float8 if kind == "float8" else _to_int4
    parts = [function(part.bfloat16().float()) for part in weight.split(rows)]
    return Quantized(torch.cat([part.codes for part in parts]), torch.cat([part.scale for part in parts]))


def _to_float8(rows: Tensor) -> Quantized:
    largest = rows.abs().amax(1, keepdim=True)
    scale = _power_of_2_above(largest / torch.full_like(largest, LARGEST_FLOAT8))
    return Quantized((rows / scale).to(torch.float8_e4m3fn), scale.bfloat16())


def _power_of_2_above(numbers: Tensor) -> Tensor:
    """The next power of 2; of what is no number none, so that damaged weights do not become numbers."""
    exponent = torch.frexp(numbers).exponent
    return torch.ldexp(torch.ones_like(numbers), exponent).where(numbers.isfinite(), torch.nan)


def _to_int4(rows: Tensor) -> Quantized:
    groups = rows.unflatten(1, (-1, group_size(rows.shape[1])))
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    # A GPU divides by a number as if it were multiplied with another.
    steps = (high - low) / torch.full_like(low, LARGEST_CODE)
    widest = _power_of_2_above(steps.amax(1, keepdim=True) / LARGEST_FACTOR)
    best: _Codes | None = None
    for part in (1, 0.5):  # The range of a row's widest groups is cut where that makes the others so much finer.
        found = _with_scale(groups, low, high, steps, (part * widest).clamp(min=LEAST_SCALE))
        best = found if best is None else found.where_better(best, dim=1)
    assert best is not None
    first, second = _int4_codes(groups / (best.factor * best.scale), best.zero).byte().unflatten(1, (-1, 2)).unbind(2)
    of_groups = ((best.factor.int() - 1 << 4) | best.zero.int()).byte()
    scales = best.scale[:, 0].contiguous().view(torch.uint8)
    return Quantized((first | second << 4).flatten(1), torch.cat([of_groups[..., 0], scales], 1))


class _Codes(NamedTuple):
    """What makes codes of numbers [rows, groups, numbers of a group]; parts of it may be the same for several."""

    error: Tensor
    factor: Tensor
    zero: Tensor
    scale: Tensor

    def where_better(self, other: _Codes, *, dim: int | None = None) -> _Codes:
        """This where its error is smaller, else the other: for each group, or for all along `dim`."""
        errors = [one.error if dim is None else one.error.sum(dim, keepdim=True) for one in (self, other)]
        is_better = errors[0] < 0.999999 * errors[1]  # Not by what depends on the order of a sum.
        return _Codes(*(torch.where(is_better, ours, theirs) for ours, theirs in zip(self, other, strict=True)))


def _with_scale(groups: Tensor, low: Tensor, high: Tensor, steps: Tensor, scale: Tensor) -> _Codes:
    """What makes the codes with the least error, with given scales of rows. `steps`: from a code to the next, where a
    group's codes reach from `low` to `high`."""
    best: _Codes | None = None
    for rounded in (torch.ceil, torch.floor):
        factor = rounded(steps / scale).clamp_(1, LARGEST_FACTOR)
        step = factor * scale
        middle = LARGEST_CODE / 2 - (low + high) / 2 / step
        scaled = groups / step
        for zero in (middle.floor().clamp_(0, LARGEST_CODE), middle.ceil().clamp_(0, LARGEST_CODE)):
            numbers = _int4_codes(scaled, zero).sub_(zero).mul_(step)
            error = numbers.sub_(groups).double().square_().sum(-1, keepdim=True)
            found = _Codes(error, factor, zero, scale)
            best = found if best is None else found.where_better(best)
    assert best is not None
    return best


def _int4_codes(scaled: Tensor, zero: Tensor) -> Tensor:
    return (scaled + zero).round_().clamp_(0, LARGEST_CODE)
