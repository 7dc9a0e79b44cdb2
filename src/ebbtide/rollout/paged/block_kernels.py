"""What lies between the matmuls of a transformer block, as three Triton kernels: residual add with RMS norm; norm and
RoPE of queries and keys, with keys and values written to the KV cache; and the gate of the MLP.

Every value is rounded where transformers' own operations round it, so that the results differ only by the order in
which a norm's squares are added.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm(x, delta, weight, added, normed, eps, width: tl.constexpr, padded: tl.constexpr, adds: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    real = column < width
    kind: tl.constexpr = normed.dtype.element_ty
    value = tl.load(x + row * width + column, mask=real, other=0.0)
    if adds:
        value = (value.to(tl.float32) + tl.load(delta + row * width + column, mask=real, other=0.0).to(tl.float32)).to(
            kind
        )
        tl.store(added + row * width + column, value, mask=real)
    wide = value.to(tl.float32)
    root = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    scaled = (wide * root).to(kind).to(tl.float32) * tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    tl.store(normed + row * width + column, scaled.to(kind), mask=real)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns x + delta, and its RMS norm: both [T, width]."""
    rows, width = x.shape
    added = x if delta is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    padded = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        x,
        delta if delta is not None else x,
        weight,
        added,
        normed,
        eps,
        width,
        padded,
        delta is not None,
        num_warps=8 if padded >= 2048 else 4,
    )
    return added, normed


@triton.jit
def _rotate(
    x,  # one token's heads
    weight,
    cos,
    sin,
    eps,
    heads: tl.constexpr,
    channels: tl.constexpr,
    padded_heads: tl.constexpr,
    padded: tl.constexpr,
    norms: tl.constexpr,
):
    """Normalises all heads of a token and applies RoPE; returns the first halves of their channels, and the second."""
    half: tl.constexpr = channels // 2
    kind: tl.constexpr = x.dtype.element_ty
    head, column = tl.arange(0, padded_heads)[:, None], tl.arange(0, padded)[None, :]
    inside, real = (head < heads) & (column < half), column < half
    place = x + head * channels + column
    low, high = (
        tl.load(place, mask=inside, other=0.0).to(tl.float32),
        tl.load(place + half, mask=inside, other=0.0).to(tl.float32),
    )
    if norms:
        root = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / channels + eps)[:, None]
        low = (
            ((low * root).to(kind).to(tl.float32) * tl.load(weight + column, mask=real, other=0.0).to(tl.float32))
            .to(kind)
            .to(tl.float32)
        )
        high = (
            (high * root).to(kind).to(tl.float32) * tl.load(weight + half + column, mask=real, other=0.0).to(tl.float32)
        ).to(kind)
        high = high.to(tl.float32)
    cos_low, cos_high = (
        tl.load(cos + column, mask=real, other=0.0).to(tl.float32),
        tl.load(cos + half + column, mask=real, other=0.0).to(tl.float32),
    )
    sin_low, sin_high = (
        tl.load(sin + column, mask=real, other=0.0).to(tl.float32),
        tl.load(sin + half + column, mask=real, other=0.0).to(tl.float32),
    )
    first = (low * cos_low).to(kind).to(tl.float32) + (-high * sin_low).to(kind).to(tl.float32)
    second = (high * cos_high).to(kind).to(tl.float32) + (low * sin_high).to(kind).to(tl.float32)
    return first.to(kind), second.to(kind)


@triton.jit(do_not_specialize=["layer"])
def _rope_and_write_cache(
    query,  # [T, heads * channels]
    key,  # [T, kv heads * channels]
    value,
    query_weight,
    key_weight,
    cos,  # [T, channels]
    sin,
    rotated,  # [T, heads, channels]
    addresses,  # [layers, 2] int64
    layer,
    slots,  # [T]: -1 for padding
    query_stride,
    key_stride,
    value_stride,
    eps,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    channels: tl.constexpr,
    padded_heads: tl.constexpr,
    padded_kv_heads: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    norms: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = channels // 2
    kind: tl.constexpr = tl.pointer_type(rotated.dtype.element_ty)
    cos += token * channels
    sin += token * channels
    column = tl.arange(0, padded)[None, :]
    if tl.program_id(1) == 0:
        query_first, query_second = _rotate(
            query + token * query_stride, query_weight, cos, sin, eps, heads, channels, padded_heads, padded, norms
        )
        query_head = tl.arange(0, padded_heads)[:, None]
        query_inside = (query_head < heads) & (column < half)
        target = rotated + (token * heads + query_head) * channels + column
        tl.store(target, query_first, mask=query_inside)
        tl.store(target + half, query_second, mask=query_inside)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        head = tl.arange(0, padded_kv_heads)[:, None]
        inside = (head < kv_heads) & (column < half) & (slot >= 0)
        first, second = _rotate(
            key + token * key_stride, key_weight, cos, sin, eps, kv_heads, channels, padded_kv_heads, padded, norms
        )
        place = ((slot // block * kv_heads + head) * block + slot % block) * channels + column
        keys = tl.load(addresses + 2 * layer).to(kind)
        tl.store(keys + place, first, mask=inside)
        tl.store(keys + place + half, second, mask=inside)
        source = value + token * value_stride + head * channels + column
        values = tl.load(addresses + 2 * layer + 1).to(kind)
        tl.store(values + place, tl.load(source, mask=inside), mask=inside)
        tl.store(values + place + half, tl.load(source + half, mask=inside), mask=inside)


def rope_and_write_cache(
    query: Tensor,  # [T, heads * channels]
    key: Tensor,
    value: Tensor,
    norms: tuple[Tensor, Tensor] | None,  # weights of the norms of queries and keys
    eps: float,
    cos: Tensor,  # [T, channels]
    sin: Tensor,
    addresses: Tensor,
    layer: int,
    slots: Tensor,  # [T] int32
    block: int,
    channels: int,
) -> Tensor:
    """Returns the queries after norm and RoPE, [T, heads, channels]; the keys and values are written to the cache."""
    tokens, heads, kv_heads = len(query), query.shape[1] // channels, key.shape[1] // channels
    rotated = torch.empty((tokens, heads, channels), dtype=query.dtype, device=query.device)
    weights = norms or (query, query)
    _rope_and_write_cache[(tokens, 2)](
        query, key, value, *weights, cos, sin, rotated, addresses, layer, slots,
        query.stride(0), key.stride(0), value.stride(0), eps, heads, kv_heads, channels,
        *map(triton.next_power_of_2, (heads, kv_heads, channels // 2)), block, norms is not None, num_warps=2,
    )  # fmt: skip
    return rotated


@triton.jit
def _gate(gate, up, out, count, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    kind: tl.constexpr = out.dtype.element_ty
    value = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    active = (value / (1.0 + tl.exp(-value))).to(kind).to(tl.float32)
    tl.store(out + place, (active * tl.load(up + place, mask=inside, other=0.0).to(tl.float32)).to(kind), mask=inside)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up."""
    out = torch.empty_like(gate)
    _gate[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), 1024, num_warps=4)
    return out
