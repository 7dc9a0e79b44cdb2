"""Paged attention for prefill, with many queries for each sequence, as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.model.attention_kernels import STRIP, TILE, dot_precision, online_softmax


@triton.jit(do_not_specialize=["layer", "prompt_width", "own_width", "window"])
def _prefill(
    query,  # [T, heads, channels]
    addresses,
    layer,
    tiles,  # [tiles, 2]: the sequence, and its first query
    sequences,  # [S, 4]: first token in `query`, number of tokens, position of the first, length of the prompt
    prompt_tables,  # [S, blocks]
    own_tables,  # [S, blocks]
    out,  # [T, heads, channels]
    prompt_width,
    own_width,
    window,
    scale,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    channels: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    strip: tl.constexpr,
    tile: tl.constexpr,
    windowed: tl.constexpr,
    precision: tl.constexpr,
):
    number, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles + 2 * number)
    begin = tl.load(tiles + 2 * number + 1)
    first = tl.load(sequences + 4 * sequence)
    count = tl.load(sequences + 4 * sequence + 1)
    start = tl.load(sequences + 4 * sequence + 2)
    prompt = tl.load(sequences + 4 * sequence + 3)
    kind: tl.constexpr = tl.pointer_type(query.dtype.element_ty)
    keys = tl.multiple_of(tl.load(addresses + 2 * layer).to(kind), 16)
    values = tl.multiple_of(tl.load(addresses + 2 * layer + 1).to(kind), 16)
    kv_head = head // (heads // kv_heads)
    row = begin + tl.arange(0, tile)
    inside = row < count
    position = start + row
    channel = tl.arange(0, padded)
    real = channel < channels
    place = ((first + row).to(tl.int64) * heads + head) * channels
    q = tl.load(query + place[:, None] + channel[None, :], mask=inside[:, None] & real[None, :], other=0.0)
    largest = tl.full([tile], -float("inf"), tl.float32)
    total = tl.zeros([tile], tl.float32)
    acc = tl.zeros([tile, padded], tl.float32)
    end = start + tl.minimum(count, begin + tile)
    since = 0
    if windowed:
        since = tl.maximum(0, start + begin - window + 1) // strip * strip
    for at in range(since, end, strip):
        token = at + tl.arange(0, strip)
        there = token < end
        of_prompt = token < prompt
        of_own = token - prompt
        in_prompt = tl.load(
            prompt_tables + sequence.to(tl.int64) * prompt_width + token // block, mask=there & of_prompt, other=0
        )
        in_own = tl.load(
            own_tables + sequence.to(tl.int64) * own_width + of_own // block, mask=there & (of_own >= 0), other=0
        )
        at_block = tl.where(of_prompt, in_prompt, in_own).to(tl.int64)
        source = ((at_block * kv_heads + kv_head) * block + tl.where(of_prompt, token, of_own) % block) * channels
        valid = there[:, None] & real[None, :]
        k = tl.load(keys + source[:, None] + channel[None, :], mask=valid, other=0.0)
        v = tl.load(values + source[:, None] + channel[None, :], mask=valid, other=0.0)
        seen = (position[:, None] >= token[None, :]) & there[None, :]
        if windowed:
            seen = seen & (position[:, None] - token[None, :] < window)
        largest, total, acc = online_softmax(q, k, v, seen, scale, largest, total, acc, precision)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + place[:, None] + channel[None, :], result.to(out.dtype.element_ty), mask=inside[:, None] & real[None, :]
    )


def prefill(
    query: Tensor,  # [T, heads, channels]
    addresses: Tensor,
    layer: int,
    kv_heads: int,
    block: int,
    tiles: Tensor,  # [tiles, 2] int32: the sequence, and its first query
    # [S, 4] int32: first token in `query`, number of tokens, position of the first, length of the prompt
    sequences: Tensor,
    prompt_tables: Tensor,  # [S, blocks] int32
    own_tables: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Computes causal attention of the new tokens of all sequences, which lie one after the other, to all tokens of
    their sequences: [T, heads, channels]."""
    _, heads, channels = query.shape
    query = query.contiguous()
    out = torch.empty_like(query)
    _prefill[(len(tiles), heads)](
        query,
        addresses,
        layer,
        tiles,
        sequences,
        prompt_tables,
        own_tables,
        out,
        prompt_tables.shape[1],
        own_tables.shape[1],
        window or 0,
        scale,
        heads,
        kv_heads,
        channels,
        max(16, triton.next_power_of_2(channels)),
        block,
        STRIP,
        TILE,
        window is not None,
        dot_precision(query.dtype),
        num_warps=4,
    )
    return out
