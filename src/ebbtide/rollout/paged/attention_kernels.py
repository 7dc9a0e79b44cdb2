"""Attention over the paged cache as Triton kernels: decoding, one query a sample, with a group's prompt read once for all of its samples; and reading, many queries a sequence.

Decoding cuts contexts into splits so that few samples keep a whole GPU busy. Each program reads one split of one key-value head: of a prompt for all samples of its
group together, or of one sample's own tokens. It writes the weighted values of its split, normalised, and the log of its sum; a second kernel adds the splits up.

In the cache, each key-value head of a block lies together. Lengths, tables and the addresses of the cache are read on the device: a captured launch serves every step, and every cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 512  # tokens, or more where contexts are long
MOST_SPLITS = 16
STRIP = 64  # tokens that a program holds at once
TILE = 64  # queries that a program reads with


@triton.jit
def _absorb(q, k, v, seen, scale, largest, total, acc, precision: tl.constexpr):
    """Adds a strip of tokens to what queries have found so far: the largest score, the sum of exp, and the weighted values."""
    scores = tl.dot(q, tl.trans(k), input_precision=precision).to(tl.float32) * scale
    scores = tl.where(seen, scores, -float("inf"))
    new = tl.maximum(largest, tl.max(scores, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)
    shrink = tl.exp(largest - safe)
    weights = tl.exp(scores - safe[:, None])
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=precision).to(tl.float32)
    return new, total, acc


@triton.jit(do_not_specialize=["layer", "prompt_width", "own_width", "rows", "prompt_splits", "window"])
def _split(
    query,  # [B, heads, channels]
    addresses,  # [layers, 2] int64: of the keys [blocks, kv heads, block, channels] and the values
    layer,
    firsts,  # [B + 1]: the first row of each prompt's group, then B for those that are none
    prompt_tables,  # [B, blocks]
    prompt_lengths,  # [B]: 0 where there is none
    own_tables,  # [B, blocks]
    own_lengths,  # [B]
    own_starts,  # [B]: position of each sample's first own token
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
    lanes: tl.constexpr,  # queries that a program holds: samples x heads for each key-value head, and padding
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
            position = tl.load(own_starts + rows_now, mask=inside, other=0) + tl.load(own_lengths + rows_now, mask=inside, other=1) - 1
        for at in range(begin, end, strip):
            token = at + tl.arange(0, strip)
            there = token < end
            number_of = tl.load(table + token // block, mask=there, other=0)
            source = ((number_of.to(tl.int64) * kv_heads + head) * block + token % block) * channels
            held = there[:, None] & real[None, :]
            k = tl.load(keys + source[:, None] + channel[None, :], mask=held, other=0.0)
            v = tl.load(values + source[:, None] + channel[None, :], mask=held, other=0.0)
            seen = there[None, :]
            if windowed:
                seen = seen & (position[:, None] - (start + token)[None, :] < window)
            largest, total, acc = _absorb(q, k, v, seen, scale, largest, total, acc, precision)
        some = total > 0
        out = acc / tl.where(some, total, 1.0)[:, None]
        target = (place_of * rows + rows_now).to(tl.int64) * heads + query_head
        tl.store(mixed + target[:, None] * channels + channel[None, :], out, mask=inside[:, None] & real[None, :])
        tl.store(sums + target, tl.where(some, largest + tl.log(tl.where(some, total, 1.0)), -float("inf")), mask=inside)


@triton.jit(do_not_specialize=["rows", "prompt_splits"])
def _merge(
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


@triton.jit(do_not_specialize=["layer", "prompt_width", "own_width", "window"])
def _read(
    query,  # [T, heads, channels]
    addresses,
    layer,
    tiles,  # [tiles, 2]: the sequence, and its first query
    sequences,  # [S, 4]: first token in `query`, how many, position of the first, length of the prompt
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
        in_prompt = tl.load(prompt_tables + sequence.to(tl.int64) * prompt_width + token // block, mask=there & of_prompt, other=0)
        in_own = tl.load(own_tables + sequence.to(tl.int64) * own_width + of_own // block, mask=there & (of_own >= 0), other=0)
        at_block = tl.where(of_prompt, in_prompt, in_own).to(tl.int64)
        source = ((at_block * kv_heads + kv_head) * block + tl.where(of_prompt, token, of_own) % block) * channels
        held = there[:, None] & real[None, :]
        k = tl.load(keys + source[:, None] + channel[None, :], mask=held, other=0.0)
        v = tl.load(values + source[:, None] + channel[None, :], mask=held, other=0.0)
        seen = (position[:, None] >= token[None, :]) & there[None, :]
        if windowed:
            seen = seen & (position[:, None] - token[None, :] < window)
        largest, total, acc = _absorb(q, k, v, seen, scale, largest, total, acc, precision)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + place[:, None] + channel[None, :], result.to(out.dtype.element_ty), mask=inside[:, None] & real[None, :])


@triton.jit(do_not_specialize=["layer"])
def _place(
    key,  # [T, kv heads, channels], any strides
    value,
    addresses,
    layer,
    slots,  # [T]: -1 for none
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
    real = real & (slot >= 0)  # padding has no place
    target = ((slot // block * kv_heads + head) * block + slot % block) * channels + channel
    tl.store(keys + target, tl.load(key + token * key_token + head * key_head + channel, mask=real), mask=real)
    tl.store(values + target, tl.load(value + token * value_token + head * value_head + channel, mask=real), mask=real)


def splits_for(tokens: int) -> int:
    """Tokens of a split, so that a context of so many has few enough of them."""
    return max(SPLIT, int(triton.next_power_of_2(triton.cdiv(tokens, MOST_SPLITS))))


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def decode(
    query: Tensor,  # [B, heads, channels]
    addresses: Tensor,  # [layers, 2] int64
    layer: int,
    kv_heads: int,
    block: int,
    firsts: Tensor,  # [B + 1] int32: the first row of each group, then B
    prompt_tables: Tensor,  # [B, blocks] int32
    prompt_lengths: Tensor,  # [B] int32: of each group's prompt; 0 past the last group
    own_tables: Tensor,  # [B, blocks] int32
    own_lengths: Tensor,  # [B] int32: own tokens, the new one among them
    own_starts: Tensor,  # [B] int32: the prompt's length for each row
    samples: int,  # the most that a group has
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of one new token a sample to its prompt and its own tokens: [B, heads, channels]."""
    rows, heads, channels = query.shape
    query = query.contiguous()
    longest = [block * tables.shape[1] for tables in (prompt_tables, own_tables)]
    split = splits_for(max(longest))
    prompt_splits, own_splits = (triton.cdiv(length, split) for length in longest)
    mixed = torch.empty((prompt_splits + own_splits, rows, heads, channels), dtype=torch.float32, device=query.device)
    sums = torch.empty((prompt_splits + own_splits, rows, heads), dtype=torch.float32, device=query.device)
    lanes = max(16, triton.next_power_of_2(min(samples * (heads // kv_heads), 32)), triton.next_power_of_2(heads // kv_heads))
    padded = max(16, triton.next_power_of_2(channels))
    _split[(2 * rows, kv_heads, max(prompt_splits, own_splits))](
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
        _precision(query.dtype),
        num_warps=2,
        num_stages=3,
    )
    out = torch.empty_like(query)
    _merge[(rows, heads)](mixed, sums, own_starts, own_lengths, out, rows, prompt_splits, heads, channels, padded, split, num_warps=1)
    return out


def read(
    query: Tensor,  # [T, heads, channels]
    addresses: Tensor,
    layer: int,
    kv_heads: int,
    block: int,
    tiles: Tensor,  # [tiles, 2] int32
    sequences: Tensor,  # [S, 4] int32
    prompt_tables: Tensor,  # [S, blocks] int32
    own_tables: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention of new tokens, end to end, to all tokens of their sequences: [T, heads, channels]."""
    _, heads, channels = query.shape
    query = query.contiguous()
    out = torch.empty_like(query)
    _read[(len(tiles), heads)](
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
        _precision(query.dtype),
        num_warps=4,
    )
    return out


def place(key: Tensor, value: Tensor, addresses: Tensor, layer: int, slots: Tensor, block: int) -> None:
    """Writes the keys and values [T, kv heads, channels] of new tokens into the cache."""
    tokens, kv_heads, channels = key.shape
    _place[(tokens, kv_heads)](
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
