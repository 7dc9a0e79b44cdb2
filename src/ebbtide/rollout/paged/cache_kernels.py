"""Writes new keys and values to the paged KV cache: as they are, or after norm and RoPE, with the bits of training
(model/rope_kernels.py).

The cache layout is [blocks, kv heads, block, channels]: a block's tokens of one key-value head are contiguous. Lengths,
block tables and the addresses of the cache are read on the device: a captured launch serves every step and every cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.model.block_kernels import UNFUSED
from ebbtide.model.block_reference import Rotary
from ebbtide.model.dependent_launch import wait_for_results
from ebbtide.model.launch import launch_options, starts_early
from ebbtide.model.rope_kernels import rotary_sizes, rotary_warps, rotate_heads


@triton.jit(do_not_specialize=["layer"])
def _rope_and_write_cache(
    qkv,  # [T, (heads + 2 kv_heads) * channels]
    query_weight,
    key_weight,
    cos,  # [T, channels]
    sin,
    query,  # [T, heads, channels]
    addresses,  # [layers, 2] int64
    slots,  # [T]: -1 for padding
    layer,
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
    block: tl.constexpr,
    early: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    kind: tl.constexpr = tl.pointer_type(query.dtype.element_ty)
    keys, values = tl.load(addresses + 2 * layer).to(kind), tl.load(addresses + 2 * layer + 1).to(kind)
    wait_for_results(early)
    half: tl.constexpr = channels // 2
    qkv += token * (heads + 2 * kv_heads) * channels
    cos += token * channels
    sin += token * channels
    rotate_heads(
        qkv, query_weight, cos, sin, query + token * heads * channels, eps, offset, heads, channels, padded_heads,
        padded, norms, wide, 1, channels, True,
    )  # fmt: skip
    place = (slot // block * kv_heads * block + slot % block) * channels  # of the first head; the next lies a block on
    qkv += heads * channels
    rotate_heads(
        qkv, key_weight, cos, sin, keys + place, eps, offset, kv_heads, channels, padded_kv_heads, padded, norms, wide,
        1, block * channels, slot >= 0,
    )  # fmt: skip
    qkv += kv_heads * channels
    head, column = tl.arange(0, padded_kv_heads)[:, None], tl.arange(0, padded)[None, :]
    inside = (head < kv_heads) & (column < half) & (slot >= 0)
    source, target = qkv + head * channels + column, values + place + head * block * channels + column
    tl.store(target, tl.load(source, mask=inside), mask=inside)
    tl.store(target + half, tl.load(source + half, mask=inside), mask=inside)


def rope_and_write_cache(
    qkv: Tensor,  # [T, (heads + 2 kv_heads) * channels]
    rotary: Rotary,
    addresses: Tensor,
    layer: int,
    slots: Tensor,  # [T] int32
    block: int,
) -> Tensor:
    """Returns the queries after norm and RoPE, [T, heads, channels]; the keys and values are written to the cache."""
    query = torch.empty((len(qkv), rotary.heads, rotary.channels), dtype=qkv.dtype, device=qkv.device)
    sizes, norm, early = rotary_sizes(rotary), rotary.norm, starts_early(qkv)
    _rope_and_write_cache[(len(qkv),)](
        qkv, *(rotary.norms or (qkv, qkv)), rotary.cos, rotary.sin, query, addresses, slots, layer,
        norm.eps, norm.offset, *sizes, rotary.norms is not None, norm.wide, block, early,
        num_warps=rotary_warps(sizes), **launch_options(early), **UNFUSED,
    )  # fmt: skip
    return query


@triton.jit(do_not_specialize=["layer"])
def _write_cache(
    key,  # [T, kv heads, channels], any strides
    value,
    addresses,
    layer,
    slots,  # [T]: -1 for padding
    key_token,
    key_head,
    value_token,
    value_head,
    kv_heads: tl.constexpr,
    channels: tl.constexpr,
    value_channels: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind: tl.constexpr = tl.pointer_type(key.dtype.element_ty)
    keys = tl.load(addresses + 2 * layer).to(kind)
    values = tl.load(addresses + 2 * layer + 1).to(kind)
    channel = tl.arange(0, padded)
    slot = tl.load(slots + token).to(tl.int64)
    real = (channel < channels) & (slot >= 0)  # padding has no slot
    real_value = (channel < value_channels) & (slot >= 0)
    place = (slot // block * kv_heads + head) * block + slot % block
    key += token * key_token + head * key_head
    value += token * value_token + head * value_head
    tl.store(keys + place * channels + channel, tl.load(key + channel, mask=real), mask=real)
    found = tl.load(value + channel, mask=real_value)
    tl.store(values + place * value_channels + channel, found, mask=real_value)


def write_cache(key: Tensor, value: Tensor, addresses: Tensor, layer: int, slots: Tensor, block: int) -> None:
    """Writes the keys and values [T, kv heads, channels] of new tokens to their slots of the cache."""
    tokens, kv_heads, channels = key.shape
    _write_cache[(tokens, kv_heads)](
        key,
        value,
        addresses,
        layer,
        slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv_heads,
        channels,
        value.shape[2],
        triton.next_power_of_2(max(channels, value.shape[2])),
        block,
        num_warps=1,
    )
