"""Paged attention for decode, with one query for each sample, as Triton kernels, in the order of
model/attention_kernels.py: a group's prompt is loaded once for all of its samples.

Splits let few samples keep a whole GPU busy (split-KV, as flash-decoding). First each program loads the part of one
split that is the group's prompt, in whole strips, for all samples of the group together; then each loads the rest of
one split for one sample, and begins with the state that the prompt's strips of that split left. The last kernel merges
the splits, if there can be several.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.model.attention_kernels import (
    WIDE,
    add_sink,
    dot_precision,
    finish_split,
    first_seen,
    mask_of,
    online_softmax,
    padded_channels,
    split_weights,
    stages_that_fit,
    strip_of,
)
from ebbtide.model.attention_kind import PLAIN, AttentionKind
from ebbtide.model.attention_sizes import MOST_SPLITS, SPLIT
from ebbtide.model.block_kernels import UNFUSED
from ebbtide.model.dependent_launch import wait_for_results
from ebbtide.model.launch import launch_options, starts_early

WARPS, STAGES = 4, 2
FEW_WARPS, SMALL = 2, 128  # Warps of a program that reads one sample's tokens, if heads have no more channels.
FEW, MANY = 16, 64  # Queries of a program that reads a prompt.


@triton.jit
def _prompt_rows(table, width, at, head, kv_heads: tl.constexpr, strip: tl.constexpr, block: tl.constexpr):
    """Where [strip] the prompt's tokens from position `at` on have the keys of a head, counted in tokens of the cache
    [blocks, kv heads, block]. `at` is a multiple of `strip`, `width` the length of the block table."""
    lane = tl.arange(0, strip)
    if block % strip == 0:  # they are in one block
        return (tl.load(table + at // block).to(tl.int64) * kv_heads + head) * block + at % block + lane
    else:
        token = at + lane
        number = tl.load(table + token // block, mask=token < width * block, other=0).to(tl.int64)
        return (number * kv_heads + head) * block + token % block


@triton.jit
def _own_rows(
    table, width, prompt_table, tail, prompt, at, head, kv_heads: tl.constexpr, strip: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """The same for a sample's own tokens, which follow on those of its prompt: the prompt's last ones share a strip
    with the first own ones. `tail`: the block of the prompt's last ones."""
    lane = tl.arange(0, strip)
    first = at - prompt  # the number of the first own token
    if block % strip == 0:  # They are in two blocks. What decides which is computed once for all.
        in_prompt, number = first < 0, tl.maximum(first, 0) // block
        here, after = tl.load(table + number), tl.load(table + tl.minimum(number + 1, width - 1))
        low, high = tl.where(in_prompt, tail, here).to(tl.int64), tl.where(in_prompt, here, after).to(tl.int64)
        in_low = tl.where(in_prompt, -first, (number + 1) * block - first)  # tokens
        low_row = (low * kv_heads + head) * block + tl.where(in_prompt, at % block, first - number * block)
        high_row = (high * kv_heads + head) * block - in_low
        return tl.where(lane < in_low, low_row, high_row) + lane
    else:
        token, own = at + lane, first + lane
        from_prompt = tl.load(prompt_table + token // block, mask=own < 0, other=0)
        from_own = tl.load(table + own // block, mask=(own >= 0) & (own < width * block), other=0)
        number = tl.where(own < 0, from_prompt, from_own).to(tl.int64)
        return (number * kv_heads + head) * block + tl.where(own < 0, token, own) % block


@triton.jit
def _load_rows(place, there, channel, channels: tl.constexpr, padded: tl.constexpr):
    """[strip, padded]: the channels of those tokens that are `there`, each at its address; 0 for others."""
    if channels == padded:
        return tl.load(place[:, None] + channel[None, :], mask=there[:, None], other=0.0)
    else:
        inside = there[:, None] & (channel < channels)[None, :]
        return tl.load(place[:, None] + channel[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["layer", "prompt_width", "rows", "span"])
def _read_prompts(
    query,  # [B, heads, channels]
    addresses,  # [layers, 2] int64: addresses of the keys [blocks, kv heads, block, channels] and of the values
    firsts,  # [B + 1]: the first row of each prompt's group, then B as padding
    prompt_tables,  # [B, blocks]
    prompt_lengths,  # [B]: 0 where there is none
    own_lengths,  # [B]
    mixed,  # [splits, B, heads, value channels] fp32: the result of a split, or the state's weighted values
    sums,  # [splits, B, heads] fp32: log of the sum of exp, or the state's sum
    highest,  # [B, heads] fp32: the state's largest score
    layer,
    prompt_width,
    rows,
    span,
    scale,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    channels: tl.constexpr,
    padded: tl.constexpr,
    value_channels: tl.constexpr,
    padded_values: tl.constexpr,
    block: tl.constexpr,
    split: tl.constexpr,
    strip: tl.constexpr,
    lanes: tl.constexpr,  # queries of a program: samples x heads for each key-value head, and padding up to a tile
    mask: tl.constexpr,
    softcap: tl.constexpr,
    precision: tl.constexpr,
    early: tl.constexpr,
):
    group, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    each: tl.constexpr = heads // kv_heads
    prompt = tl.load(prompt_lengths + group)
    first, last = tl.load(firsts + group), tl.load(firsts + group + 1)
    table = prompt_tables + group.to(tl.int64) * prompt_width
    kind: tl.constexpr = tl.pointer_type(query.dtype.element_ty)
    keys = tl.multiple_of(tl.load(addresses + 2 * layer).to(kind), 16)
    values = tl.multiple_of(tl.load(addresses + 2 * layer + 1).to(kind), 16)
    begin = number * split
    end = tl.minimum(prompt // strip * strip, begin + split)
    wait_for_results(early)
    if begin >= end:
        return
    lane, channel, value_channel = tl.arange(0, lanes), tl.arange(0, padded), tl.arange(0, padded_values)
    real, real_value = channel < channels, value_channel < value_channels
    per_pass: tl.constexpr = lanes // each  # samples
    for row in range(first, last, per_pass):
        rows_now = row + lane // each
        inside = (rows_now < last) & (lane < per_pass * each)
        query_head = head * each + lane % each
        place = (rows_now.to(tl.int64) * heads + query_head) * channels
        q = tl.load(query + place[:, None] + channel[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        position = prompt + tl.load(own_lengths + rows_now, mask=inside, other=1) - 1
        largest = tl.full([lanes], -float("inf"), tl.float32)
        total = tl.zeros([lanes], tl.float32)
        acc = tl.zeros([lanes, padded_values], tl.float32)
        since = begin
        if mask > 0:  # strips that no query sees change nothing
            lowest = tl.min(tl.where(inside, first_seen(position, span, mask), prompt), 0)
            since = tl.maximum(begin, lowest // strip * strip)
        for at in range(since, end, strip):
            token = at + tl.arange(0, strip)
            row_of, there = _prompt_rows(table, prompt_width, at, head, kv_heads, strip, block), token < end
            k = _load_rows(keys + row_of * channels, there, channel, channels, padded)
            v = _load_rows(values + row_of * value_channels, there, value_channel, value_channels, padded_values)
            seen = position[:, None] >= token[None, :]
            if mask > 0:
                seen = seen & (token[None, :] >= first_seen(position, span, mask)[:, None])
            largest, total, acc = online_softmax(q, k, v, seen, scale, largest, total, acc, precision, softcap)
        target = (number * rows + rows_now).to(tl.int64) * heads + query_head
        whole = end == begin + split
        result, log_total = finish_split(largest, total, acc)
        result, log_total = tl.where(whole, result, acc), tl.where(whole, log_total, total)
        place = mixed + target[:, None] * value_channels + value_channel[None, :]
        tl.store(place, result, mask=inside[:, None] & real_value[None, :])
        tl.store(sums + target, log_total, mask=inside)
        tl.store(highest + rows_now * heads + query_head, largest, mask=inside & (end < begin + split))


@triton.jit(do_not_specialize=["layer", "prompt_width", "own_width", "rows", "span"])
def _read_own(
    query,  # [B, heads, channels]
    addresses,
    groups,  # [B]: the group of each row, whose table has its prompt
    prompt_tables,  # [B, blocks]
    own_tables,  # [B, blocks]
    own_lengths,  # [B]
    own_starts,  # [B]: the prompt's length for each row
    mixed,
    sums,
    highest,
    out,  # [B, heads, value channels], written if there is one split
    sinks,  # [heads], if `has_sinks`
    layer,
    prompt_width,
    own_width,
    rows,
    span,
    scale,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    channels: tl.constexpr,
    padded: tl.constexpr,
    value_channels: tl.constexpr,
    padded_values: tl.constexpr,
    block: tl.constexpr,
    split: tl.constexpr,
    strip: tl.constexpr,
    lanes: tl.constexpr,
    mask: tl.constexpr,
    softcap: tl.constexpr,
    precision: tl.constexpr,
    has_sinks: tl.constexpr,
    alone: tl.constexpr,  # whether there is one split
    early: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    each: tl.constexpr = heads // kv_heads
    prompt, own = tl.load(own_starts + row), tl.load(own_lengths + row)
    prompt_table = prompt_tables + tl.load(groups + row).to(tl.int64) * prompt_width
    own_table = own_tables + row.to(tl.int64) * own_width
    kind: tl.constexpr = tl.pointer_type(query.dtype.element_ty)
    keys = tl.multiple_of(tl.load(addresses + 2 * layer).to(kind), 16)
    values = tl.multiple_of(tl.load(addresses + 2 * layer + 1).to(kind), 16)
    lane, channel, value_channel = tl.arange(0, lanes), tl.arange(0, padded), tl.arange(0, padded_values)
    real, real_value = channel < channels, value_channel < value_channels
    inside = lane < each
    query_head = head * each + lane
    place = row.to(tl.int64) * heads + query_head
    at_out = out + place[:, None] * value_channels + value_channel[None, :]
    whole = inside[:, None] & real_value[None, :]
    length = prompt + own
    number = prompt // split + tl.program_id(2)
    begin = number * split
    read = prompt // strip * strip  # by the group, in the strips before it
    since, end = tl.maximum(begin, read), tl.minimum(length, begin + split)
    tail = tl.load(prompt_table + read // block, mask=read < prompt, other=0)
    wait_for_results(early)
    if own == 0:  # padding
        if alone:
            tl.store(at_out, tl.zeros([lanes, padded_values], out.dtype.element_ty), mask=whole)
        return
    if begin >= length:
        return
    q_source = query + place[:, None] * channels + channel[None, :]
    q = tl.load(q_source, mask=inside[:, None] & real[None, :], other=0.0)
    target = (number * rows + row).to(tl.int64) * heads + query_head
    at_target = mixed + target[:, None] * value_channels + value_channel[None, :]
    begun = inside & (since > begin)
    acc = tl.load(at_target, mask=begun[:, None] & real_value[None, :], other=0.0)
    total = tl.load(sums + target, mask=begun, other=0.0)
    largest = tl.load(highest + row * heads + query_head, mask=begun, other=-float("inf"))
    if mask > 0:
        since = tl.maximum(since, first_seen(length - 1, span, mask) // strip * strip)
    for at in range(since, end, strip):
        token = at + tl.arange(0, strip)
        row_of = _own_rows(own_table, own_width, prompt_table, tail, prompt, at, head, kv_heads, strip, block)
        there = token < end
        k = _load_rows(keys + row_of * channels, there, channel, channels, padded)
        v = _load_rows(values + row_of * value_channels, there, value_channel, value_channels, padded_values)
        seen = there[None, :] & (lane >= 0)[:, None]
        if mask > 0:
            seen = seen & (token >= first_seen(length - 1, span, mask))[None, :]
        largest, total, acc = online_softmax(q, k, v, seen, scale, largest, total, acc, precision, softcap)
    result, log_total = finish_split(largest, total, acc)
    if alone:
        if has_sinks:
            sink = tl.load(sinks + query_head, mask=inside, other=0.0).to(tl.float32)
            one = tl.full([lanes], 1.0, tl.float32)
            log_total, total, result = add_sink(log_total, one, result, sink)
            result = result / total[:, None]
        tl.store(at_out, result.to(out.dtype.element_ty), mask=whole)
    else:
        tl.store(at_target, result, mask=whole)
        tl.store(sums + target, log_total, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _merge_splits(
    mixed,  # [splits, B, heads, channels] fp32, with the channels of values
    sums,  # [splits, B, heads]
    own_starts,  # [B]: the prompt's length for each row
    own_lengths,  # [B]
    out,  # [B, heads, channels]
    sinks,  # [heads], if `has_sinks`
    rows,
    heads: tl.constexpr,
    channels: tl.constexpr,
    padded: tl.constexpr,
    split: tl.constexpr,
    has_sinks: tl.constexpr,
    early: tl.constexpr,
):
    wait_for_results(early)
    row, head = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, padded)
    real = channel < channels
    own = tl.load(own_lengths + row)
    count = tl.where(own > 0, tl.cdiv(tl.load(own_starts + row) + own, split), 0)
    largest = -float("inf")
    total = 0.0
    merged = tl.zeros([padded], tl.float32)
    for number in range(0, count):
        place = (number * rows + row).to(tl.int64) * heads + head
        largest, shrink, weight = split_weights(largest, tl.load(sums + place))
        merged = merged * shrink + weight * tl.load(mixed + place * channels + channel, mask=real, other=0.0)
        total = total * shrink + weight
    if has_sinks:
        largest, shrink, weight = split_weights(largest, tl.load(sinks + head).to(tl.float32))
        merged, total = merged * shrink, total * shrink + weight
    result = merged / tl.where(total > 0, total, 1.0)
    tl.store(out + (row.to(tl.int64) * heads + head) * channels + channel, result.to(out.dtype.element_ty), mask=real)


def decode(
    query: Tensor,  # [B, heads, channels]
    addresses: Tensor,  # [layers, 2] int64
    layer: int,
    kv_heads: int,
    block: int,
    firsts: Tensor,  # [B + 1] int32: the first row of each group, then B as padding
    groups: Tensor,  # [B] int32: the group of each row
    prompt_tables: Tensor,  # [B, blocks] int32: of each group
    prompt_lengths: Tensor,  # [B] int32: the length of each group's prompt; 0 past the last group
    own_tables: Tensor,  # [B, blocks] int32
    own_lengths: Tensor,  # [B] int32: own tokens, the new one among them; 0 for padding
    own_starts: Tensor,  # [B] int32: the prompt's length for each row
    samples: int,  # the most samples that a group has
    scale: float,
    kind: AttentionKind = PLAIN,
    value_channels: int | None = None,  # as keys have
) -> Tensor:
    """Computes attention of one new token for each sample to its prompt and its own tokens: [B, heads, value
    channels]."""
    rows, heads, channels = query.shape
    query, values, each = query.contiguous(), value_channels or channels, heads // kv_heads
    padded = padded_channels(channels), padded_channels(values)
    strip, (span, mask) = strip_of(max(padded)), mask_of(kind)
    prompt, own = (block * tables.shape[1] for tables in (prompt_tables, own_tables))
    split = max(SPLIT, int(triton.next_power_of_2(triton.cdiv(prompt + own, MOST_SPLITS))))
    prompt_splits, splits = triton.cdiv(prompt, split), triton.cdiv(prompt + own, split)
    own_splits = min(splits, triton.cdiv(own, split) + 1)  # they begin inside a split
    mixed = torch.empty((splits, rows, heads, values), dtype=torch.float32, device=query.device)
    sums = torch.empty((splits, rows, heads), dtype=torch.float32, device=query.device)
    highest = torch.empty((rows, heads), dtype=torch.float32, device=query.device)
    out = query.new_empty((rows, heads, values))
    sizes = heads, kv_heads, channels, padded[0], values, padded[1], block, split, strip
    many = MANY if max(padded) <= WIDE else FEW
    lanes = FEW if reads_together(samples, each) else max(many, triton.next_power_of_2(each))
    own_lanes = max(16, triton.next_power_of_2(each))  # A matmul has at least 16 rows.
    last = mask, kind.softcap or 0.0, dot_precision(query.dtype)
    sinks, has_sinks = (kind.sinks, True) if kind.sinks is not None else (query, False)
    early, warps = starts_early(query), FEW_WARPS if max(padded) <= SMALL else WARPS
    options = launch_options(early) | UNFUSED
    _read_prompts[(rows, kv_heads, prompt_splits)](
        query, addresses, firsts, prompt_tables, prompt_lengths, own_lengths, mixed, sums, highest,
        layer, prompt_tables.shape[1], rows, span, scale, *sizes, lanes, *last, early,
        num_warps=WARPS, num_stages=stages_that_fit(query, padded, strip, lanes, STAGES), **options,
    )  # fmt: skip
    _read_own[(rows, kv_heads, own_splits)](
        query, addresses, groups, prompt_tables, own_tables, own_lengths, own_starts, mixed, sums, highest, out, sinks,
        layer, prompt_tables.shape[1], own_tables.shape[1], rows, span, scale, *sizes, own_lanes, *last, has_sinks,
        splits == 1, early,
        num_warps=warps, num_stages=stages_that_fit(query, padded, strip, own_lanes, STAGES), **options,
    )  # fmt: skip
    if splits > 1:
        _merge_splits[(rows, heads)](
            mixed, sums, own_starts, own_lengths, out, sinks, rows, heads, values, padded[1], split, has_sinks, early,
            num_warps=1, **options,
        )  # fmt: skip
    return out


def reads_together(samples: int, queries_per_key: int) -> bool:
    """Whether a group of so many samples is few enough for the smaller programs that read prompts."""
    return samples * queries_per_key <= FEW
