"""Norm and RoPE of queries and keys of block_reference.py, forward and backward, as Triton kernels: one pass each.

A program computes all heads of a token. Heads lie in the rows of a tile, and the two halves of their channels, which
RoPE mixes, in two tiles of the same layout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.model.block_kernels import UNFUSED, persistent_programs, scaled_by_root
from ebbtide.model.block_reference import Rotary
from ebbtide.model.launch import Launcher


@triton.jit
def _halves(x, half: tl.constexpr, inside):
    """The two halves of what lies at x, in float32."""
    low = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    return low, tl.load(x + half, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _added_halves(x, head, column, half: tl.constexpr, inside, channels: tl.constexpr, copies: tl.constexpr):
    """The two halves of each head, added up over its copies."""
    low, high = _halves(x + head * copies * channels + column, half, inside)
    for copy in tl.static_range(1, copies):
        more_low, more_high = _halves(x + (head * copies + copy) * channels + column, half, inside)
        low += more_low
        high += more_high
    return low, high


@triton.jit
def _root(low, high, eps, channels: tl.constexpr):
    return tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / channels + eps)[:, None]


@triton.jit
def rotate_heads(
    x,  # one token's heads
    weight,
    cos,
    sin,
    out,
    eps,
    offset,
    heads: tl.constexpr,
    channels: tl.constexpr,
    padded_heads: tl.constexpr,
    padded: tl.constexpr,
    norms: tl.constexpr,
    wide: tl.constexpr,
    copies: tl.constexpr,  # of each head in the output
    step: tl.constexpr,  # numbers from a head to the next in the output
    writes,  # whether anything is written
):
    """Normalises and rotates all heads of a token. Trainer and sampler both call this, with the same tiles and warps,
    so that their bits are the same."""
    half: tl.constexpr = channels // 2
    kind: tl.constexpr = out.dtype.element_ty
    head, column = tl.arange(0, padded_heads)[:, None], tl.arange(0, padded)[None, :]
    real = column < half
    inside = (head < heads) & real
    place = head * channels + column
    low, high = _halves(x + place, half, inside)
    if norms:
        weight_low, weight_high = _halves(weight + column, half, real)
        root = _root(low, high, eps, channels)
        low = (scaled_by_root(low, root, kind, wide) * (weight_low + offset)).to(kind).to(tl.float32)
        high = (scaled_by_root(high, root, kind, wide) * (weight_high + offset)).to(kind).to(tl.float32)
    cos_low, cos_high = _halves(cos + column, half, real)
    sin_low, sin_high = _halves(sin + column, half, real)
    first = (low * cos_low).to(kind).to(tl.float32) + (-high * sin_low).to(kind).to(tl.float32)
    second = (high * cos_high).to(kind).to(tl.float32) + (low * sin_high).to(kind).to(tl.float32)
    for copy in tl.static_range(copies):
        target = out + (head * copies + copy) * step + column
        tl.store(target, first.to(kind), mask=inside & writes)
        tl.store(target + half, second.to(kind), mask=inside & writes)


@triton.jit
def _rotate(
    qkv,  # [T, (heads + 2 kv_heads) * channels]
    query_weight,
    key_weight,
    cos,  # [T, channels]
    sin,
    query,  # [T, heads, channels]
    key,  # [T, kv_heads * copies, channels]
    value,  # the same; written only if there are copies
    eps,
    offset,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    channels: tl.constexpr,
    padded_heads: tl.constexpr,
    padded_kv_heads: tl.constexpr,
    padded: tl.constexpr,
    norms: tl.constexpr,
    wide: tl.constexpr,
    expands: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    copies: tl.constexpr = heads // kv_heads if expands else 1
    qkv += token * (heads + 2 * kv_heads) * channels
    cos += token * channels
    sin += token * channels
    query += token * heads * channels
    key += token * kv_heads * copies * channels
    rotate_heads(
        qkv, query_weight, cos, sin, query, eps, offset, heads, channels, padded_heads, padded, norms, wide, 1,
        channels, True,
    )  # fmt: skip
    qkv += heads * channels
    rotate_heads(
        qkv, key_weight, cos, sin, key, eps, offset, kv_heads, channels, padded_kv_heads, padded, norms, wide, copies,
        channels, True,
    )  # fmt: skip
    if expands:
        qkv += kv_heads * channels
        value += token * kv_heads * copies * channels
        half: tl.constexpr = channels // 2
        head, column = tl.arange(0, padded_kv_heads)[:, None], tl.arange(0, padded)[None, :]
        inside = (head < kv_heads) & (column < half)
        low = tl.load(qkv + head * channels + column, mask=inside)
        high = tl.load(qkv + head * channels + column + half, mask=inside)
        for copy in tl.static_range(copies):
            target = value + (head * copies + copy) * channels + column
            tl.store(target, low, mask=inside)
            tl.store(target + half, high, mask=inside)


_launch_rotate = Launcher(_rotate, **UNFUSED)


def rotate(
    qkv: Tensor,
    rotary: Rotary,
) -> tuple[Tensor, Tensor]:
    """The same as `block_reference.rotate`."""
    query, key, _ = _rotated(qkv, rotary, expands=False)
    return query, key


def rotate_expanded(
    qkv: Tensor,
    rotary: Rotary,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `block_reference.rotate_expanded`."""
    return _rotated(qkv, rotary, expands=True)


def _rotated(
    qkv: Tensor,
    rotary: Rotary,
    *,
    expands: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and, if it `expands` them to the query heads, values."""
    tokens, keys = len(qkv), rotary.heads if expands else rotary.kv_heads
    qkv = qkv.contiguous()
    query = torch.empty((tokens, rotary.heads, rotary.channels), dtype=qkv.dtype, device=qkv.device)
    key = torch.empty((tokens, keys, rotary.channels), dtype=qkv.dtype, device=qkv.device)
    value = torch.empty_like(key) if expands else key
    sizes = rotary_sizes(rotary)
    weights, norm = rotary.norms or (qkv, qkv), rotary.norm
    _launch_rotate(
        tokens,
        (qkv, *weights, rotary.cos.contiguous(), rotary.sin.contiguous(), query, key, value),
        (norm.eps, norm.offset),
        *sizes,
        rotary.norms is not None,
        norm.wide,
        expands,
        warps=rotary_warps(sizes),
    )
    return query, key, value


@triton.jit
def _rotate_heads_back(
    x,  # one token's heads
    grad,  # of what they became
    weight_low,  # [1, padded], with the offset
    weight_high,
    cos,
    sin,
    out,  # the gradient of the heads
    total_low,  # [padded_heads, padded]: the gradient of the weight, before it is added over the heads
    total_high,
    eps,
    heads: tl.constexpr,
    channels: tl.constexpr,
    padded_heads: tl.constexpr,
    padded: tl.constexpr,
    norms: tl.constexpr,
    wide: tl.constexpr,
    copies: tl.constexpr,  # of each head, whose gradients are added up
):
    half: tl.constexpr = channels // 2
    kind: tl.constexpr = out.dtype.element_ty
    head, column = tl.arange(0, padded_heads)[:, None], tl.arange(0, padded)[None, :]
    real = column < half
    inside = (head < heads) & real
    place = head * channels + column
    above_low, above_high = _added_halves(grad, head, column, half, inside, channels, copies)
    cos_low, cos_high = _halves(cos + column, half, real)
    sin_low, sin_high = _halves(sin + column, half, real)
    first = above_low * cos_low + above_high * sin_high
    second = above_high * cos_high - above_low * sin_low
    if norms:
        low, high = _halves(x + place, half, inside)
        root = _root(low, high, eps, channels)
        total_low += first * scaled_by_root(low, root, kind, wide)
        total_high += second * scaled_by_root(high, root, kind, wide)
        first *= weight_low
        second *= weight_high
        shared = (tl.sum(first * low, 1) + tl.sum(second * high, 1))[:, None] / channels * root * root
        first = root * (first - low * shared)
        second = root * (second - high * shared)
    tl.store(out + place, first.to(kind), mask=inside)
    tl.store(out + place + half, second.to(kind), mask=inside)
    return total_low, total_high


@triton.jit(do_not_specialize=["tokens", "query_step", "key_step", "value_step"])
def _rotate_backward(
    qkv,  # [T, (heads + 2 kv_heads) * channels]
    query_weight,
    key_weight,
    cos,  # [T, channels]
    sin,
    dquery,  # [T, heads, channels], a token every `query_step * unit` numbers
    dkey,  # the same: of a key and a value for each query head
    dvalue,
    dqkv,
    partials,  # [programs, 2, channels]
    tokens,
    query_step,
    key_step,
    value_step,
    eps,
    offset,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    channels: tl.constexpr,
    padded_heads: tl.constexpr,
    padded_kv_heads: tl.constexpr,
    padded: tl.constexpr,
    unit: tl.constexpr,
    norms: tl.constexpr,
    wide: tl.constexpr,
):
    half: tl.constexpr = channels // 2
    row: tl.constexpr = (heads + 2 * kv_heads) * channels
    head, column = tl.arange(0, padded_kv_heads)[:, None], tl.arange(0, padded)[None, :]
    real = column < half
    inside = (head < kv_heads) & real
    query_low, query_high = tl.zeros([padded_heads, padded], tl.float32), tl.zeros([padded_heads, padded], tl.float32)
    key_low, key_high = (
        tl.zeros([padded_kv_heads, padded], tl.float32),
        tl.zeros([padded_kv_heads, padded], tl.float32),
    )
    query_weight_low, query_weight_high = _halves(query_weight + column, half, real)
    key_weight_low, key_weight_high = _halves(key_weight + column, half, real)
    query_weight_low += offset
    query_weight_high += offset
    key_weight_low += offset
    key_weight_high += offset
    for number in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tl.cast(number, tl.int64)
        x, out = qkv + token * row, dqkv + token * row
        token_cos, token_sin = cos + token * channels, sin + token * channels
        query_low, query_high = _rotate_heads_back(
            x, dquery + token * query_step * unit, query_weight_low, query_weight_high, token_cos, token_sin, out,
            query_low, query_high, eps, heads, channels, padded_heads, padded, norms, wide, 1,
        )  # fmt: skip
        x, out = x + heads * channels, out + heads * channels
        key_low, key_high = _rotate_heads_back(
            x, dkey + token * key_step * unit, key_weight_low, key_weight_high, token_cos, token_sin, out,
            key_low, key_high, eps, kv_heads, channels, padded_kv_heads, padded, norms, wide, heads // kv_heads,
        )  # fmt: skip
        low, high = _added_halves(
            dvalue + token * value_step * unit, head, column, half, inside, channels, heads // kv_heads
        )
        target = out + kv_heads * channels + head * channels + column
        tl.store(target, low.to(dqkv.dtype.element_ty), mask=inside)
        tl.store(target + half, high.to(dqkv.dtype.element_ty), mask=inside)
    if norms:
        partials += tl.program_id(0).to(tl.int64) * 2 * channels
        lane = tl.arange(0, padded)
        tl.store(partials + lane, tl.sum(query_low, 0), mask=lane < half)
        tl.store(partials + half + lane, tl.sum(query_high, 0), mask=lane < half)
        tl.store(partials + channels + lane, tl.sum(key_low, 0), mask=lane < half)
        tl.store(partials + channels + half + lane, tl.sum(key_high, 0), mask=lane < half)


_launch_rotate_backward = Launcher(_rotate_backward)


def rotate_backward(
    qkv: Tensor,
    rotary: Rotary,
    dquery: Tensor,
    dkey: Tensor,
    dvalue: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same as `block_reference.rotate_backward`."""
    tokens, norms, norm = len(qkv), rotary.norms, rotary.norm
    qkv = qkv.contiguous()
    grads = [_heads_together(grad) for grad in (dquery, dkey, dvalue)]
    strides = [grad.stride(0) if tokens > 1 else grad[0].numel() for grad in grads]
    # A program's stride is not known when it is compiled, but that it keeps loads of 16 bytes aligned is.
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    # The fastest of those tried on an H200. The gradients of norms take registers, and so fewer programs run at a time.
    programs = persistent_programs(qkv, tokens, 64 if norms is None else 4)
    dqkv = torch.empty_like(qkv)
    partials = torch.empty((programs, 2, rotary.channels), dtype=torch.float32, device=qkv.device)
    sizes = rotary_sizes(rotary)
    _launch_rotate_backward(
        programs,
        (qkv, *(norms or (qkv, qkv)), rotary.cos.contiguous(), rotary.sin.contiguous(), *grads, dqkv, partials),
        (tokens, *(stride // unit for stride in strides), norm.eps, norm.offset),
        *sizes,
        unit,
        norms is not None,
        norm.wide,
        warps=4 if sizes[3] * sizes[5] >= 1024 else 1,
    )
    if norms is None:
        return dqkv, None, None
    of_query, of_key = partials.sum(0)
    return dqkv, of_query.to(norms[0].dtype), of_key.to(norms[1].dtype)


def _heads_together(grad: Tensor) -> Tensor:
    """The same numbers, with the heads of a token one after another."""
    return grad if grad[:1].is_contiguous() else grad.contiguous()


def rotary_sizes(rotary: Rotary) -> list[int]:
    """Query heads, key heads and channels, and the powers of two that heads and half the channels are padded to."""
    sizes = [rotary.heads, rotary.kv_heads, rotary.channels]
    return sizes + [triton.next_power_of_2(size) for size in (rotary.heads, rotary.kv_heads, rotary.channels // 2)]


def rotary_warps(sizes: list[int]) -> int:
    return 2 if sizes[3] * sizes[5] <= 1024 else 4
