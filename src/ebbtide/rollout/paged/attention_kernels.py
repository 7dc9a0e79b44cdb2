"""What the decode and prefill kernels of paged attention share: the layout of the KV cache, and the kernel that writes
new keys and values to it.

The cache layout is [blocks, kv heads, block, channels]: a block's tokens of one key-value head are contiguous. Lengths,
block tables and the addresses of the cache are read on the device: a captured launch serves every step and every cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


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
    padded: tl.constexpr,
    block: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind: tl.constexpr = tl.pointer_type(key.dtype.element_ty)
    keys = tl.load(addresses + 2 * layer).to(kind)
    values = tl.load(addresses + 2 * layer + 1).to(kind)
    channel = tl.arange(0, padded)
    real = channel < channels
    slot = tl.load(slots + token).to(tl.int64)
    real = real & (slot >= 0)  # padding has no slot
    target = ((slot // block * kv_heads + head) * block + slot % block) * channels + channel
    tl.store(keys + target, tl.load(key + token * key_token + head * key_head + channel, mask=real), mask=real)
    tl.store(values + target, tl.load(value + token * value_token + head * value_head + channel, mask=real), mask=real)


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
        triton.next_power_of_2(channels),
        block,
        num_warps=1,
    )
