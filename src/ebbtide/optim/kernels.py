"""rule.py as one Triton kernel: each number is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ebbtide.optim.rule import Rule, State

BLOCK = 1024  # elements of a program


@triton.jit(do_not_specialize=["start", "key"])
def _update(
    weight,
    grad,
    low,
    first,
    second,
    size,
    start,
    key,
    scale,
    shrink,
    gain1,
    beta2,
    gain2,
    step_size,
    root,
    eps,
    narrow: tl.constexpr,
    stochastic: tl.constexpr,
    block: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32) * scale
    m = tl.load(first + place, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(second + place, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(weight + place, mask=inside, other=0.0)
    if narrow:  # the master from its two halves
        lower = tl.load(low + place, mask=inside, other=0).to(tl.int32) & 0xFFFF
        signed = v.to(tl.int32, bitcast=True) < 0
        up = (lower > 0x8000) | ((lower == 0x8000) & signed)
        upper = p.to(tl.int16, bitcast=True).to(tl.int32) - up.to(tl.int32)
        p = ((upper << 16) | lower).to(tl.float32, bitcast=True)
        v = tl.abs(v)

    p = p * shrink
    m = m + (g - m) * gain1
    v = v * beta2 + g * g * gain2
    p = p - step_size * libdevice.div_rn(m, libdevice.div_rn(libdevice.sqrt_rn(v), root) + eps)

    if stochastic:
        x = ((start + place) * 0x9E3779B1 + key).to(tl.uint32)
        x = ((x ^ (x >> 16)).to(tl.int64) * 0x7FEB352D).to(tl.uint32)
        x = ((x ^ (x >> 15)).to(tl.int64) * 0x846CA68B).to(tl.uint32)
        x = x ^ (x >> 16)
        m = ((m.to(tl.uint32, bitcast=True) + (x & 0xFFFF)) & 0xFFFF0000).to(tl.uint32).to(tl.float32, bitcast=True)
        v = ((v.to(tl.uint32, bitcast=True) + (x >> 16)) & 0xFFFF0000).to(tl.uint32).to(tl.float32, bitcast=True)
    if narrow:
        bits = p.to(tl.int32, bitcast=True)
        lower = bits & 0xFFFF
        up = (lower == 0x8000) & (((bits >> 16) & 1) == 1)
        v = (v.to(tl.int32, bitcast=True) | (up.to(tl.int32) << 31)).to(tl.float32, bitcast=True)
        tl.store(low + place, lower.to(tl.int16), mask=inside)
    tl.store(weight + place, p.to(weight.dtype.element_ty), mask=inside)
    tl.store(first + place, m.to(first.dtype.element_ty), mask=inside)
    tl.store(second + place, v.to(second.dtype.element_ty), mask=inside)


def update(weight: Tensor, grad: Tensor, state: State, rule: Rule, start: int) -> None:
    """`rule.update` on a GPU. The products are not fused with the sums, so that every variant of the kernel computes the same bits."""
    beta1, beta2 = rule.config.betas
    with torch.cuda.device(weight.device):
        _update[(triton.cdiv(len(weight), BLOCK),)](
            weight,
            grad,
            weight if state.low is None else state.low,
            state.first,
            state.second,
            len(weight),
            start,
            rule.key,
            rule.scale,
            rule.shrink,
            1 - beta1,
            beta2,
            1 - beta2,
            rule.step_size,
            rule.root,
            rule.config.eps,
            narrow=state.low is not None,
            stochastic=rule.stochastic,
            block=BLOCK,
            enable_fp_fusion=False,
        )
