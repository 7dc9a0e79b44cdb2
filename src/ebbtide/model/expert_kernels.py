"""What experts need of block_reference.py as Triton kernels: the sum over a token's experts, whose rows stay where the
experts wrote them, and the backward of their activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.model.block_kernels import activation_and_slope, column_block, warps
from ebbtide.model.block_reference import Activation
from ebbtide.model.dependent_launch import wait_for_results
from ebbtide.model.launch import Launcher


@triton.jit
def _combine(
    rows,  # [T * count, width]
    inverse,  # [T, count]
    weights,  # [T, count]
    out,  # [T, width]
    width: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
    count: tl.constexpr,
    weighted: tl.constexpr,
    early: tl.constexpr,
):
    wait_for_results(early)
    program = tl.program_id(0)
    token, column = (program // blocks).to(tl.int64), program % blocks * block + tl.arange(0, block)
    inside = column < width
    total = tl.zeros([block], tl.float32)
    for place in tl.static_range(count):
        row = tl.load(inverse + token * count + place).to(tl.int64)
        value = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if weighted:
            value *= tl.load(weights + token * count + place)
        total += value
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


_launch_combine = Launcher(_combine, dependent=True)


def combine(rows: Tensor, inverse: Tensor, weights: Tensor | None) -> Tensor:
    """The same as `block_reference.combine`."""
    (tokens, count), width = inverse.shape, rows.shape[1]
    rows, inverse = rows.contiguous(), inverse.contiguous()
    out = torch.empty((tokens, width), dtype=rows.dtype, device=rows.device)
    block = column_block(width)
    blocks = triton.cdiv(width, block)
    tensors = rows, inverse, rows if weights is None else weights.contiguous(), out
    weighted = weights is not None
    _launch_combine(tokens * blocks, tensors, (), width, blocks, block, count, weighted, warps=warps(block))
    return out


@triton.jit
def _activate_weighted_backward(
    gate_up,  # [N, 2 width]: its gradient is written over it
    grad,  # [N, width]: the weighted product is written over it
    weights,  # [N]
    of_weights,  # [N]
    width: tl.constexpr,
    padded: tl.constexpr,
    gelu: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, padded)
    inside = column < width
    kind: tl.constexpr = grad.dtype.element_ty
    gate_place, up_place = gate_up + row * 2 * width + column, gate_up + row * 2 * width + width + column
    gate = tl.load(gate_place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_place, mask=inside, other=0.0).to(tl.float32)
    above = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights + row)
    active, slope = activation_and_slope(gate, kind, gelu)
    product = (active * up).to(kind).to(tl.float32)
    tl.store(of_weights + row, tl.sum(product * above, 0))
    above *= weight
    tl.store(grad + row * width + column, (product * weight).to(kind), mask=inside)
    tl.store(gate_place, (above * up * slope).to(kind), mask=inside)
    tl.store(up_place, (above * active).to(kind), mask=inside)


_launch_activate_weighted_backward = Launcher(_activate_weighted_backward)


def activate_weighted_backward(
    gate_up: Tensor, grad: Tensor, weights: Tensor, kind: Activation
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `block_reference.activate_weighted_backward`: the first two, contiguous ones, are overwritten and
    returned."""
    if not (gate_up.is_contiguous() and grad.is_contiguous()):
        raise ValueError(f"only contiguous tensors are overwritten, not {gate_up.stride()} and {grad.stride()}")
    rows, width = grad.shape
    of_weights = torch.empty(rows, dtype=torch.float32, device=grad.device)
    padded = triton.next_power_of_2(width)
    tensors = gate_up, grad, weights.contiguous(), of_weights
    _launch_activate_weighted_backward(rows, tensors, (), width, padded, kind == "gelu_tanh", warps=warps(padded))
    return grad, gate_up, of_weights
