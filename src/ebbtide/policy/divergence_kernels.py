"""divergence_reference.py as two Triton kernels, without an fp32 tensor of a chunk's size: the forward reads the logits
of both models twice, the backward once, and writes its gradient over the policy's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.policy.divergence_reference import TINY, RowFigures
from ebbtide.policy.head import Head
from ebbtide.policy.logprob_kernels import shape_logits

BLOCK = 2048  # Columns that a program processes at a time.
FORWARD_KL, REVERSE_KL, MIXTURE = 0, 1, 2


@triton.jit
def _grow(largest, total, x, inside):
    """One more block in a log-sum-exp by lanes."""
    new = tl.where(inside, tl.maximum(largest, x), largest)
    shrink = tl.where(largest == new, 1.0, tl.exp(largest - new))
    return new, total * shrink + tl.where(inside, tl.exp(x - new), 0.0)


@triton.jit
def _merge(largest, total):
    """The log-sum-exp of all lanes."""
    top = tl.max(largest, 0)
    return top + tl.log(tl.sum(total * tl.exp(largest - top), 0))


@triton.jit
def _mixed(p, q, beta, tiny):
    """m, above 0."""
    return tl.maximum(beta * q + (1 - beta) * p, tiny)


@triton.jit
def _reduce(
    logits,
    teacher_logits,
    targets,
    divergences,
    logprobs,
    entropies,
    lses,
    teacher_lses,
    centres,
    columns,
    stride,
    teacher_stride,
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    beta,
    tiny,
    capped: tl.constexpr,
    teacher_capped: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start, teacher_start = logits + row * stride, teacher_logits + row * teacher_stride
    largest = tl.full([block], -float("inf"), tl.float32)
    teacher_largest = tl.full([block], -float("inf"), tl.float32)
    total, teacher_total = tl.zeros([block], tl.float32), tl.zeros([block], tl.float32)
    for first in range(0, columns, block):
        column = first + tl.arange(0, block)
        inside = column < columns
        x, _ = shape_logits(tl.load(start + column, mask=inside, other=0.0).to(tl.float32), scale, softcap, capped)
        y = tl.load(teacher_start + column, mask=inside, other=0.0).to(tl.float32)
        y, _ = shape_logits(y, teacher_scale, teacher_softcap, teacher_capped)
        largest, total = _grow(largest, total, x, inside)
        teacher_largest, teacher_total = _grow(teacher_largest, teacher_total, y, inside)
    lse, teacher_lse = _merge(largest, total), _merge(teacher_largest, teacher_total)

    entropy, from_p, from_q = (
        tl.zeros([block], tl.float32),
        tl.zeros([block], tl.float32),
        tl.zeros([block], tl.float32),
    )
    for first in range(0, columns, block):
        column = first + tl.arange(0, block)
        inside = column < columns
        x, _ = shape_logits(tl.load(start + column, mask=inside, other=0.0).to(tl.float32), scale, softcap, capped)
        y = tl.load(teacher_start + column, mask=inside, other=0.0).to(tl.float32)
        y, _ = shape_logits(y, teacher_scale, teacher_softcap, teacher_capped)
        log_p, log_q = x - lse, y - teacher_lse
        p = tl.where(inside, tl.exp(log_p), 0.0)
        entropy -= p * log_p
        if kind == 1:
            from_p += p * (log_p - log_q)
        else:
            q = tl.where(inside, tl.exp(log_q), 0.0)
            if kind == 0:
                from_q += q * (log_q - log_p)
            else:
                log_m = tl.log(_mixed(p, q, beta, tiny))
                from_p += tl.where(p > 0, p * (log_p - log_m), 0.0)
                from_q += tl.where(q > 0, q * (log_q - log_m), 0.0)
    of_p, of_q = tl.sum(from_p, 0), tl.sum(from_q, 0)
    chosen, _ = shape_logits(tl.load(start + tl.load(targets + row)).to(tl.float32), scale, softcap, capped)
    tl.store(divergences + row, beta * of_q + (1 - beta) * of_p if kind == 2 else of_p + of_q)
    tl.store(logprobs + row, chosen - lse)
    tl.store(entropies + row, tl.sum(entropy, 0))
    tl.store(lses + row, lse)
    tl.store(teacher_lses + row, teacher_lse)
    tl.store(centres + row, of_p)


@triton.jit
def _gradient(
    logits,
    teacher_logits,
    lses,
    teacher_lses,
    centres,
    grads,
    columns,
    stride,
    teacher_stride,
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    beta,
    tiny,
    capped: tl.constexpr,
    teacher_capped: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    place = logits + row * stride + column
    x, slope = shape_logits(tl.load(place, mask=inside, other=0.0).to(tl.float32), scale, softcap, capped)
    y = tl.load(teacher_logits + row * teacher_stride + column, mask=inside, other=0.0).to(tl.float32)
    y, _ = shape_logits(y, teacher_scale, teacher_softcap, teacher_capped)
    log_p, log_q = x - tl.load(lses + row), y - tl.load(teacher_lses + row)
    p = tl.exp(log_p)
    if kind == 0:
        grad = p - tl.exp(log_q)
    elif kind == 1:
        grad = p * (log_p - log_q - tl.load(centres + row))
    else:
        log_ratio = log_p - tl.log(_mixed(p, tl.exp(log_q), beta, tiny))
        grad = tl.where(p > 0, (1 - beta) * p * (log_ratio - tl.load(centres + row)), 0.0)
    tl.store(place, (grad * tl.load(grads + row) * slope).to(logits.dtype.element_ty), mask=inside)


def _kind(beta: float) -> int:
    return FORWARD_KL if beta == 0 else REVERSE_KL if beta == 1 else MIXTURE


def _options(head: Head, teacher_head: Head, beta: float) -> tuple[float | bool | int, ...]:
    softcaps = head.softcap, teacher_head.softcap
    shapes = head.scale, softcaps[0] or 0.0, teacher_head.scale, softcaps[1] or 0.0
    return *shapes, beta, TINY, *(softcap is not None for softcap in softcaps), _kind(beta), BLOCK


def reduce(
    raw: Tensor, teacher_raw: Tensor, targets: Tensor, beta: float, head: Head, teacher_head: Head
) -> RowFigures:
    """The same as `divergence_reference.reduce`."""
    count, columns = raw.shape
    found = RowFigures(*torch.empty(len(RowFigures._fields), count, dtype=torch.float32, device=raw.device))
    strides = raw.stride(0), teacher_raw.stride(0)
    _reduce[(count,)](
        raw, teacher_raw, targets, *found, columns, *strides, *_options(head, teacher_head, beta), num_warps=8
    )
    return found


def gradient(
    raw: Tensor,
    teacher_raw: Tensor,
    lse: Tensor,
    teacher_lse: Tensor,
    centre: Tensor,
    grad_divergences: Tensor,
    beta: float,
    head: Head,
    teacher_head: Head,
) -> Tensor:
    """The same as `divergence_reference.gradient`, written over `raw`."""
    count, columns = raw.shape
    rows = lse, teacher_lse, centre, grad_divergences.contiguous()
    strides = raw.stride(0), teacher_raw.stride(0)
    _gradient[(count, triton.cdiv(columns, BLOCK))](
        raw, teacher_raw, *rows, columns, *strides, *_options(head, teacher_head, beta), num_warps=4
    )
    return raw
