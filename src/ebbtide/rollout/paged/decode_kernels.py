"""Paged attention for decode, with one query for each sample, as Triton kernels: a group's prompt is loaded once for
all of its samples.

Decode cuts contexts into splits (split-KV, as flash-decoding) so that few samples keep a whole GPU busy. Each program
loads one split of one key-value head: of a prompt for all samples of its group together, or of one sample's own tokens.
It writes the attention output of its split, normalised, and the log of its sum of exp; a second kernel merges the
splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.model.attention_kernels import STRIP, dot_precision, online_softmax

SPLIT = 512  # tokens of a split, or more where contexts are long
MOST_SPLITS = 16


@triton.jit(do_not_specialize=["layer", "prompt_width", "own_width", "rows", "prompt_splits", "window"])
def _decode_splits(
    query,  # [B, heads, channels]
    addresses,  # [layers, 2] int64: addresses of the keys [blocks, kv heads, block, channels] and of the values
    layer,
    firsts,  # [B + 1]: the first row of each prompt's group, then B as padding
    prompt_tables,  # [B, blocks]
    prompt_lengths,  # [B]: 0 where there is none
    own_tables,  # [B, blocks]
    own_lengths,  # [B]
    own_starts,  # [B]: the position of each sample's first own token
    mixed,  # [splits, B, heads, channels] fp32
    sums,  # [splits, B, heads] fp32: log of the sum of exp
    prompt_width,
    own_width,
    rows,
    prompt_splits,
    window,
    scale,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    channels: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    split: tl.constexpr,
    strip: tl.constexpr,
    lanes: tl.constexpr,  # queries of a program: samples x heads for each key-value head, and padding
    windowed: tl.constexpr,
    precision: tl.constexpr,
):
    unit, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    each: tl.constexpr = heads // kv_heads
    if unit < rows:  # a prompt, for its group
        length = tl.load(prompt_lengths + unit)
        first = tl.load(firsts + unit)
        last = tl.load(firsts + unit + 1)
        table = prompt_tables + unit.to(tl.int64) * prompt_width
        start = first * 0
        place_of = number
    else:  # a sample's own tokens
        first = unit - rows
        last = first + 1
        length = tl.load(own_lengths + first)
        table = own_tables + first.to(tl.int64) * own_width
        start = tl.load(own_starts + first)
        place_of = prompt_splits + number
    begin = number * split
    if begin >= length:
        return
    kind: tl.constexpr = tl.pointer_type(query.dtype.element_ty)
    keys = tl.multiple_of(tl.load(addresses + 2 * layer).to(kind), 16)
    values = tl.multiple_of(tl.load(addresses + 2 * layer + 1).to(kind), 16)
    lane = tl.arange(0, lanes)
    channel = tl.arange(0, padded)
    real = channel < channels
    end = tl.minimum(length, begin + split)
    per_pass: tl.constexpr = lanes // each  # samples
    for row in range(first, last, per_pass):
        rows_now = row + lane // each
        inside = (rows_now < last) & (lane < per_pass * each)
        query_head = head * each + lane % each
        place = (rows_now.to(tl.int64) * heads + query_head) * channels
        q = tl.load(query + place[:, None] + channel[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        largest = tl.full([lanes], -float("inf"), tl.float32)
        total = tl.zeros([lanes], tl.float32)
        acc = tl.zeros([lanes, padded], tl.float32)
        if windowed:
            position = (
                tl.load(own_starts + rows_now, mask=inside, other=0)
                + tl.load(own_lengths + rows_now, mask=inside, other=1)
                - 1
            )
        for at in range(begin, end, strip):
            token = at + tl.arange(0, strip)
            there = token < end
            number_of = tl.load(table + token // block, mask=there, other=0)
            source = ((number_of.to(tl.int64) * kv_heads + head) * block + token % block) * channels
            valid = there[:, None] & real[None, :]
            k = tl.load(keys + source[:, None] + channel[None, :], mask=valid, other=0.0)
            v = tl.load(values + source[:, None] + channel[None, :], mask=valid, other=0.0)
            seen = there[None, :]
            if windowed:
                seen = seen & (position[:, None] - (start + token)[None, :] < window)
            largest, total, acc = online_softmax(q, k, v, seen, scale, largest, total, acc, precision)
        some = total > 0
        out = acc / tl.where(some, total, 1.0)[:, None]
        target = (place_of * rows + rows_now).to(tl.int64) * heads + query_head
        tl.store(mixed + target[:, None] * channels + channel[None, :], out, mask=inside[:, None] & real[None, :])
        tl.store(
            sums + target, tl.where(some, largest + tl.log(tl.where(some, total, 1.0)), -float("inf")), mask=inside
        )


@triton.jit(do_not_specialize=["rows", "prompt_splits"])
def _merge_splits(
    mixed,  # [splits, B, heads, channels] fp32
    sums,  # [splits, B, heads]
    own_starts,  # [B]: the prompt's length for each row
    own_lengths,  # [B]
    out,  # [B, heads, channels]
    rows,
    prompt_splits,
    heads: tl.constexpr,
    channels: tl.constexpr,
    padded: tl.constexpr,
    split: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, padded)
    real = channel < channels
    of_prompt = tl.cdiv(tl.load(own_starts + row), split)
    of_own = tl.cdiv(tl.load(own_lengths + row), split)
    largest = -float("inf")
    total = 0.0
    acc = tl.zeros([padded], tl.float32)
    for number in range(0, of_prompt + of_own):
        at = tl.where(number < of_prompt, number, prompt_splits + number - of_prompt)
        place = (at * rows + row).to(tl.int64) * heads + head
        part = tl.load(sums + place)
        new = tl.maximum(largest, part)
        safe = tl.where(new == -float("inf"), 0.0, new)
        shrink, weight = tl.exp(largest - safe), tl.exp(part - safe)
        acc = acc * shrink + weight * tl.load(mixed + place * channels + channel, mask=real, other=0.0)
        total = total * shrink + weight
        largest = new
    result = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + (row.to(tl.int64) * heads + head) * channels + channel, result.to(out.dtype.element_ty), mask=real)


def split_size(tokens: int) -> int:
    """Returns the tokens of a split, so that a context of `tokens` tokens has at most `MOST_SPLITS`."""
    return max(SPLIT, int(triton.next_power_of_2(triton.cdiv(tokens, MOST_SPLITS))))


def decode(
    query: Tensor,  # [B, heads, channels]
    addresses: Tensor,  # [layers, 2] int64
    layer: int,
    kv_heads: int,
    block: int,
    firsts: Tensor,  # [B + 1] int32: the first row of each group, then B as padding
    prompt_tables: Tensor,  # [B, blocks] int32
    prompt_lengths: Tensor,  # [B] int32: the length of each group's prompt; 0 past the last group
    own_tables: Tensor,  # [B, blocks] int32
    own_lengths: Tensor,  # [B] int32: own tokens, the new one among them
    own_starts: Tensor,  # [B] int32: the prompt's length for each row
    samples: int,  # the most samples that a group has
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Computes attention of one new token for each sample to its prompt and its own tokens: [B, heads, channels]."""
    rows, heads, channels = query.shape
    query = query.contiguous()
    longest = [block * tables.shape[1] for tables in (prompt_tables, own_tables)]
    split = split_size(max(longest))
    prompt_splits, own_splits = (triton.cdiv(length, split) for length in longest)
    mixed = torch.empty((prompt_splits + own_splits, rows, heads, channels), dtype=torch.float32, device=query.device)
    sums = torch.empty((prompt_splits + own_splits, rows, heads), dtype=torch.float32, device=query.device)
    lanes = max(
        16, triton.next_power_of_2(min(samples * (heads // kv_heads), 32)), triton.next_power_of_2(heads // kv_heads)
    )
    padded = max(16, triton.next_power_of_2(channels))
    _decode_splits[(2 * rows, kv_heads, max(prompt_splits, own_splits))](
        query,
        addresses,
        layer,
        firsts,
        prompt_tables,
        prompt_lengths,
        own_tables,
        own_lengths,
        own_starts,
        mixed,
        sums,
        prompt_tables.shape[1],
        own_tables.shape[1],
        rows,
        prompt_splits,
        window or 0,
        scale,
        heads,
        kv_heads,
        channels,
        padded,
        block,
        split,
        STRIP,
        lanes,
        window is not None,
        dot_precision(query.dtype),
        num_warps=2,
        num_stages=3,
    )
    out = torch.empty_like(query)
    _merge_splits[(rows, heads)](
        mixed, sums, own_starts, own_lengths, out, rows, prompt_splits, heads, channels, padded, split, num_warps=1
    )
    return out
