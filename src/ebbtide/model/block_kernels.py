"""The norms and activations of block_reference.py as Triton kernels: each reads its tensors once, and writes once.

T is known to no kernel when it is compiled. The gradient of a norm's weight is added by a fixed number of programs,
each over its own rows, and then over the programs: always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.model.block_reference import GELU_CUBIC, GELU_SCALE, Activation, Norm
from ebbtide.model.dependent_launch import wait_for_results
from ebbtide.model.launch import Launcher
from ebbtide.system.gpu import processors

_GELU_SCALE, _GELU_CUBIC = tl.constexpr(GELU_SCALE), tl.constexpr(GELU_CUBIC)


def persistent_programs(like: Tensor, rows: int, per_processor: int) -> int:
    """How many programs share the rows: `per_processor` for every multiprocessor of the GPU."""
    if not like.is_cuda:  # Triton's interpreter, in the tests
        return min(rows, 3)
    return min(rows, per_processor * processors(like.device))


def column_block(width: int) -> int:
    """Columns of a program that computes a part of a row: of those with the least masked, the most."""
    return min((2048, 1024, 512), key=lambda block: -(-width // block) * block)


# With fused multiply-adds, products are not rounded where the code rounds them.
UNFUSED = {"enable_fp_fusion": False}


def warps(numbers: int) -> int:
    """Eight numbers a thread: one load of 16 bytes in a 16-bit type."""
    return max(1, min(16, numbers // 256))


@triton.jit
def scaled_by_root(x, root, kind: tl.constexpr, wide: tl.constexpr):
    """What a norm multiplies its weight with, in float32."""
    scaled = x * root
    if not wide:
        scaled = scaled.to(kind).to(tl.float32)
    return scaled


@triton.jit
def _add_norm(
    x,
    delta,
    weight,
    added,
    normed,
    eps,
    offset,
    width: tl.constexpr,
    padded: tl.constexpr,
    adds: tl.constexpr,
    wide: tl.constexpr,
    early: tl.constexpr,
):
    wait_for_results(early)
    start = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, padded)
    real = column < width
    kind: tl.constexpr = normed.dtype.element_ty
    scale = tl.load(weight + column, mask=real, other=0.0).to(tl.float32) + offset
    value = tl.load(x + start + column, mask=real, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(delta + start + column, mask=real, other=0.0).to(tl.float32)
        rounded = value.to(kind)
        tl.store(added + start + column, rounded, mask=real)
        value = rounded.to(tl.float32)
    root = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(normed + start + column, (scaled_by_root(value, root, kind, wide) * scale).to(kind), mask=real)


_launch_add_norm = Launcher(_add_norm, dependent=True, **UNFUSED)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """The same as `block_reference.add_norm`."""
    rows, width = x.shape
    row_major = x.contiguous()
    normed = torch.empty_like(row_major)
    added = x if delta is None else torch.empty_like(row_major)
    padded = triton.next_power_of_2(width)
    other = row_major if delta is None else delta.contiguous()
    _launch_add_norm(
        rows,
        (row_major, other, weight, normed if delta is None else added, normed),
        (norm.eps, norm.offset),
        width,
        padded,
        delta is not None,
        norm.wide,
        warps=warps(padded),
    )
    return added, normed


@triton.jit
def _norm_parts(
    x,
    weight_0,
    weight_1,
    out,
    eps,
    offset,
    width_0: tl.constexpr,
    width_1: tl.constexpr,
    whole: tl.constexpr,
    padded: tl.constexpr,
    wide: tl.constexpr,
    early: tl.constexpr,
):
    """A program has one of the two parts of a row, or what is left."""
    wait_for_results(early)
    row, part = (tl.program_id(0) // 3).to(tl.int64), tl.program_id(0) % 3
    begin = tl.where(part == 0, 0, tl.where(part == 1, width_0, width_0 + width_1))
    width = tl.where(part == 0, width_0, tl.where(part == 1, width_1, whole - width_0 - width_1))
    column = tl.arange(0, padded)
    real, place = column < width, row * whole + begin + column
    kind: tl.constexpr = out.dtype.element_ty
    given = tl.load(x + place, mask=real, other=0.0)
    if part < 2:
        scale = tl.load(tl.where(part == 0, weight_0, weight_1) + column, mask=real, other=0.0).to(tl.float32) + offset
        value = given.to(tl.float32)
        root = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        given = (scaled_by_root(value, root, kind, wide) * scale).to(kind)
    tl.store(out + place, given, mask=real)


_launch_norm_parts = Launcher(_norm_parts, dependent=True, **UNFUSED)


def norm_parts(x: Tensor, weights: tuple[Tensor, Tensor], norm: Norm) -> Tensor:
    """The same as `block_reference.norm_parts`."""
    x = x.contiguous()
    (rows, whole), widths = x.shape, [len(weight) for weight in weights]
    out = torch.empty_like(x)
    padded = triton.next_power_of_2(max(*widths, whole - sum(widths)))
    constants = *widths, whole, padded, norm.wide
    _launch_norm_parts(3 * rows, (x, *weights, out), (norm.eps, norm.offset), *constants, warps=warps(padded))
    return out


@triton.jit(do_not_specialize=["rows"])
def _norm_backward(
    x,
    weight,
    grad,
    residual,
    dx,
    normed,
    partials,  # [programs, width]
    rows,
    eps,
    offset,
    width: tl.constexpr,
    padded: tl.constexpr,
    adds: tl.constexpr,
    remakes: tl.constexpr,
    wide: tl.constexpr,
):
    program, step = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, padded)
    real = column < width
    kind: tl.constexpr = x.dtype.element_ty
    scale = tl.load(weight + column, mask=real, other=0.0).to(tl.float32) + offset
    total = tl.zeros([padded], tl.float32)
    # The next row is read while this one is computed.
    start = tl.cast(program, tl.int64) * width
    next_value = tl.load(x + start + column, mask=real, other=0.0)
    next_above = tl.load(grad + start + column, mask=real, other=0.0)
    next_aside = next_above
    if adds:
        next_aside = tl.load(residual + start + column, mask=real, other=0.0)
    for row in range(program, rows, step):
        value, above, aside = next_value.to(tl.float32), next_above.to(tl.float32), next_aside.to(tl.float32)
        after = tl.cast(row + step, tl.int64) * width
        more = real & (row + step < rows)
        next_value = tl.load(x + after + column, mask=more, other=0.0)
        next_above = tl.load(grad + after + column, mask=more, other=0.0)
        if adds:
            next_aside = tl.load(residual + after + column, mask=more, other=0.0)
        start = tl.cast(row, tl.int64) * width
        of_scaled = above * scale
        root = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        shared = tl.sum(of_scaled * value, 0) / width * root
        scaled = scaled_by_root(value, root, kind, wide)
        total += above * scaled
        below = root * (of_scaled - value * root * shared)
        if adds:
            below += aside
        tl.store(dx + start + column, below.to(kind), mask=real)
        if remakes:
            tl.store(normed + start + column, (scaled * scale).to(kind), mask=real)
    tl.store(partials + program.to(tl.int64) * width + column, total, mask=real)


_launch_norm_backward = Launcher(_norm_backward, **UNFUSED)


def norm_backward(
    x: Tensor, weight: Tensor, norm: Norm, grad: Tensor, residual: Tensor | None, *, remakes: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same as `block_reference.norm_backward`."""
    rows, width = x.shape
    x, grad = x.contiguous(), grad.contiguous()
    padded = triton.next_power_of_2(width)
    # Enough rows are read at a time to keep the memory busy: 4 of 2,048 numbers on each multiprocessor. This and the
    # warps are the fastest of those tried on an H200.
    programs = persistent_programs(x, rows, max(2, min(16, 8192 // padded)))
    dx, normed = torch.empty_like(x), torch.empty_like(x) if remakes else None
    partials = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    aside, out = x if residual is None else residual.contiguous(), dx if normed is None else normed
    _launch_norm_backward(
        programs,
        (x, weight, grad, aside, dx, out, partials),
        (rows, norm.eps, norm.offset),
        width,
        padded,
        residual is not None,
        remakes,
        norm.wide,
        warps=max(1, min(16, padded // 1024)),  # few, as they wait for each other in two sums
    )
    return dx, partials.sum(0).to(weight.dtype), normed


@triton.jit
def _sigmoid_of(gate, gelu: tl.constexpr):
    """The share of the gate that passes: both activations are gate * sigmoid(some curve of it)."""
    curve = gate
    if gelu:
        curve = 2.0 * _GELU_SCALE * (gate + _GELU_CUBIC * gate * gate * gate)
    return 1.0 / (1.0 + tl.exp(-curve))


@triton.jit
def activation_and_slope(gate, kind: tl.constexpr, gelu: tl.constexpr):
    """The activation of a gate, rounded as in the forward, and its derivative, in float32."""
    share = _sigmoid_of(gate, gelu)
    bend = gate * share * (1.0 - share)
    if gelu:
        bend *= 2.0 * _GELU_SCALE * (1.0 + 3.0 * _GELU_CUBIC * gate * gate)
    return (gate * share).to(kind).to(tl.float32), share + bend


@triton.jit
def activated(gate, up, kind: tl.constexpr, gelu: tl.constexpr):
    """The activation of a gate times the other half, both in float32."""
    active = (gate * _sigmoid_of(gate, gelu)).to(kind).to(tl.float32)
    return (active * up).to(kind)


@triton.jit
def _activate(
    gate_up,
    out,
    width: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
    gelu: tl.constexpr,
    early: tl.constexpr,
):
    wait_for_results(early)
    program = tl.program_id(0)
    row, column = (program // blocks).to(tl.int64), program % blocks * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, activated(gate, up, out.dtype.element_ty, gelu), mask=inside)


@triton.jit
def _activate_backward(
    gate_up, grad, width: tl.constexpr, blocks: tl.constexpr, block: tl.constexpr, gelu: tl.constexpr
):
    program = tl.program_id(0)
    row, column = (program // blocks).to(tl.int64), program % blocks * block + tl.arange(0, block)
    inside = column < width
    kind: tl.constexpr = grad.dtype.element_ty
    gate_place, up_place = gate_up + row * 2 * width + column, gate_up + row * 2 * width + width + column
    gate = tl.load(gate_place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_place, mask=inside, other=0.0).to(tl.float32)
    above = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    active, slope = activation_and_slope(gate, kind, gelu)
    tl.store(grad + row * width + column, (active * up).to(kind), mask=inside)
    tl.store(gate_place, (above * up * slope).to(kind), mask=inside)
    tl.store(up_place, (above * active).to(kind), mask=inside)


_launch_activate = Launcher(_activate, dependent=True, **UNFUSED)
_launch_activate_backward = Launcher(_activate_backward, **UNFUSED)


def activate(gate_up: Tensor, kind: Activation) -> Tensor:
    """The same as `block_reference.activate`."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = column_block(width)
    blocks = triton.cdiv(width, block)
    tensors = gate_up.contiguous(), out
    _launch_activate(rows * blocks, tensors, (), width, blocks, block, kind == "gelu_tanh", warps=warps(block))
    return out


def activate_backward(gate_up: Tensor, grad: Tensor, kind: Activation) -> tuple[Tensor, Tensor]:
    """The same as `block_reference.activate_backward`: both tensors, contiguous ones, are overwritten and returned."""
    if not (gate_up.is_contiguous() and grad.is_contiguous()):
        raise ValueError(f"activate_backward overwrites contiguous tensors, not {gate_up.stride()} and {grad.stride()}")
    rows, width = grad.shape
    block = column_block(width)
    blocks = triton.cdiv(width, block)
    tensors = gate_up, grad
    _launch_activate_backward(rows * blocks, tensors, (), width, blocks, block, kind == "gelu_tanh", warps=warps(block))
    return grad, gate_up
