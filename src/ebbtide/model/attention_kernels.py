"""Causal attention as Triton kernels, in an order that trainer and sampler share to the bit.

For a query the keys of its sequence are taken in strips of `STRIP` at fixed positions, by an online softmax; the strips
of a split, `SPLIT` keys at fixed positions, make one result, and the results of splits are merged from first to last.
So the bits of a token's output depend on its sequence alone: not on other sequences, on how many queries are computed
together, or on which keys were computed by an earlier call. Strips and splits that a query does not see change nothing.
Nor do the tiles and warps of a program: a matmul on the tensor cores of a Hopper GPU adds in one order in all of its
instructions, and the sum of exp is one of integers.

Here are the pieces, and the kernel for many queries of a sequence: packed, as in training, or with keys and values in a
paged cache, as in prefill. rollout/paged/decode_kernels.py has the one for a single query of each sequence.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.model.attention_kind import PLAIN, AttentionKind
from ebbtide.model.attention_sizes import SPLIT, STRIP
from ebbtide.model.block_kernels import UNFUSED

TILE, WARPS, STAGES = 64, 4, 3  # queries of a program, its warps, and strips that are loaded at once, at most
WIDE, NARROW = 256, 16  # heads of more channels than this have fewer queries in a program
WINDOW, CHUNK = 1, 2  # numbers of masks


@triton.jit
def sum_of_weights(weights):
    """The sums over keys [queries] of numbers from 0 to 1, each rounded to a multiple of 2^-23. They are added as
    integers, so that the sum does not depend on the order, which differs with the warps of a program."""
    # The bits of 1 + w are those of 1, plus w * 2^23.
    steps = (weights + 1.0).to(tl.int32, bitcast=True) - 0x3F800000
    return tl.sum(steps, 1).to(tl.float32) * 1.1920928955078125e-07


@triton.jit
def first_seen(position, span, mask: tl.constexpr):
    """The first position that a token sees: of its window (`mask` is WINDOW) or its chunk (CHUNK) of `span` tokens."""
    if mask == 1:
        return position - span + 1
    else:
        return position // span * span


@triton.jit
def online_softmax(
    q, k, v, seen, scale, largest, total, acc, precision: tl.constexpr, softcap: tl.constexpr
):  # fmt: skip
    """Adds a strip of keys and values to the state of an online softmax: the largest score, the sum of exp, and the
    weighted values. `softcap`: 0 for none."""
    scores = tl.dot(q, tl.trans(k), input_precision=precision).to(tl.float32) * scale
    if softcap > 0:
        scores = softcap - 2 * softcap / (tl.exp(scores * (2 / softcap)) + 1)  # by the definition of tanh
    scores = tl.where(seen, scores, -float("inf"))
    new = tl.maximum(largest, tl.max(scores, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)
    shrink = tl.exp(largest - safe)
    weights = tl.exp(scores - safe[:, None])
    total = total * shrink + sum_of_weights(weights)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=precision).to(tl.float32)
    return new, total, acc


@triton.jit
def finish_split(largest, total, acc):
    """(the result of a split, the log of its sum of exp: minus infinity if it has no keys)."""
    some = total > 0
    divisor = tl.where(some, total, 1.0)
    return acc / divisor[:, None], tl.where(some, largest + tl.log(divisor), -float("inf"))


@triton.jit
def split_weights(largest, part):
    """(the new largest log of a sum of exp, the factors of what was merged before, and of a split with the log
    `part`)."""
    new = tl.maximum(largest, part)
    safe = tl.where(new == -float("inf"), 0.0, new)
    return new, tl.exp(largest - safe), tl.exp(part - safe)


@triton.jit
def add_sink(highest, total, merged, sink):
    """Adds a key without a value to merged splits: `highest` is the largest log of a sum of exp of each query, `total`
    the sum of their weights, `merged` the weighted results [queries, channels]."""
    highest, shrink, weight = split_weights(highest, sink)
    return highest, total * shrink + weight, merged * shrink[:, None]


@triton.jit(do_not_specialize=["layer", "prompt_width", "own_width", "span", "tokens", "per_sequence"])
def _attend(
    query,  # [T, heads, channels]
    key,  # [T, kv heads, channels], a token every `key_step` numbers; not read if paged
    value,  # [T, kv heads, value channels]
    sinks,  # [heads], if `has_sinks`
    addresses,  # [layers, 2] int64: of the cache's keys [blocks, kv heads, block, channels] and values, if paged
    tiles,  # [tiles, 2]: the sequence, and its first query, if paged
    sequences,  # [S + 1]: starts; if paged [S, 4]: first token in `query`, tokens, first position, prompt's length
    prompt_tables,  # [S, blocks], if paged
    own_tables,  # [S, blocks], if paged
    out,  # [T, heads, value channels]
    sums,  # [heads, T]: the log of the sum of exp; not written if paged
    layer,
    prompt_width,
    own_width,
    span,
    key_step,
    value_step,
    tokens,
    per_sequence,  # tiles of a sequence, if not paged
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
    tile: tl.constexpr,
    parts: tl.constexpr,  # programs that share a tile of `tiles`, if paged
    mask: tl.constexpr,
    softcap: tl.constexpr,
    has_sinks: tl.constexpr,
    paged: tl.constexpr,
    precision: tl.constexpr,
):
    number, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // (heads // kv_heads)
    if paged:
        place_of = tiles + 2 * (number // parts)
        sequence, begin = tl.load(place_of), tl.load(place_of + 1) + number % parts * tile
        first, count = tl.load(sequences + 4 * sequence), tl.load(sequences + 4 * sequence + 1)
        start, prompt = tl.load(sequences + 4 * sequence + 2), tl.load(sequences + 4 * sequence + 3)
        if parts > 1:  # noqa: SIM102 -- the first is known when this is compiled
            if begin >= count:
                return
        kind: tl.constexpr = tl.pointer_type(query.dtype.element_ty)
        keys = tl.multiple_of(tl.load(addresses + 2 * layer).to(kind), 16)
        values = tl.multiple_of(tl.load(addresses + 2 * layer + 1).to(kind), 16)
    else:
        sequence, begin = number // per_sequence, number % per_sequence * tile
        first = tl.load(sequences + sequence)
        count = tl.load(sequences + sequence + 1) - first
        start, prompt = first * 0, first * 0
        if begin >= count:
            return
        keys = key + first.to(tl.int64) * key_step + kv_head * channels
        values = value + first.to(tl.int64) * value_step + kv_head * value_channels
    row = begin + tl.arange(0, tile)
    inside = row < count
    position = start + row
    channel, value_channel = tl.arange(0, padded), tl.arange(0, padded_values)
    real, real_value = channel < channels, value_channel < value_channels
    place = (first + row).to(tl.int64) * heads + head
    source = query + place[:, None] * channels + channel[None, :]
    q = tl.load(source, mask=inside[:, None] & real[None, :], other=0.0)
    end = start + tl.minimum(count, begin + tile)
    since = 0
    if mask > 0:
        since = tl.maximum(0, first_seen(start + begin, span, mask)) // split * split
    merged = tl.zeros([tile, padded_values], tl.float32)
    merged_total = tl.zeros([tile], tl.float32)
    highest = tl.full([tile], -float("inf"), tl.float32)
    for part in range(since, end, split):
        largest = tl.full([tile], -float("inf"), tl.float32)
        total = tl.zeros([tile], tl.float32)
        acc = tl.zeros([tile, padded_values], tl.float32)
        for at in range(part, tl.minimum(end, part + split), strip):
            token = at + tl.arange(0, strip)
            there = token < end
            if paged:
                of_prompt = token < prompt
                of_own = token - prompt
                in_prompt = tl.load(
                    prompt_tables + sequence.to(tl.int64) * prompt_width + token // block,
                    mask=there & of_prompt,
                    other=0,
                )
                in_own = tl.load(
                    own_tables + sequence.to(tl.int64) * own_width + of_own // block,
                    mask=there & (of_own >= 0),
                    other=0,
                )
                at_block = tl.where(of_prompt, in_prompt, in_own).to(tl.int64)
                slot = tl.where(of_prompt, token, of_own) % block
                of_head = (at_block * kv_heads + kv_head) * block + slot
                key_place, value_place = of_head * channels, of_head * value_channels
            else:
                key_place, value_place = token.to(tl.int64) * key_step, token.to(tl.int64) * value_step
            key_source, value_source = keys + key_place[:, None], values + value_place[:, None]
            k = tl.load(key_source + channel[None, :], mask=there[:, None] & real[None, :], other=0.0)
            v = tl.load(value_source + value_channel[None, :], mask=there[:, None] & real_value[None, :], other=0.0)
            seen = (position[:, None] >= token[None, :]) & there[None, :]
            if mask > 0:
                seen = seen & (token[None, :] >= first_seen(position, span, mask)[:, None])
            largest, total, acc = online_softmax(q, k, v, seen, scale, largest, total, acc, precision, softcap)
        result, log_total = finish_split(largest, total, acc)
        highest, shrink, weight = split_weights(highest, log_total)
        merged = merged * shrink[:, None] + weight[:, None] * result
        merged_total = merged_total * shrink + weight
    if has_sinks:
        sink = tl.load(sinks + head).to(tl.float32)
        highest, merged_total, merged = add_sink(highest, merged_total, merged, sink)
    divisor = tl.where(merged_total > 0, merged_total, 1.0)
    target = out + place[:, None] * value_channels + value_channel[None, :]
    tl.store(target, (merged / divisor[:, None]).to(out.dtype.element_ty), mask=inside[:, None] & real_value[None, :])
    if not paged:
        tl.store(sums + head.to(tl.int64) * tokens + first + row, highest + tl.log(divisor), mask=inside)


def stages_that_fit(query: Tensor, sizes: tuple[int, int], strip: int, queries: int, most: int) -> int:
    """The stages of a loop over strips, as many as a GPU's shared memory holds: of keys and values [strip, padded], for
    so many queries, with the padded channels of keys and of values. They change no bit."""
    if not query.is_cuda:  # Triton's interpreter, in the tests
        return most
    room = _shared_memory(query.device) - 8192 - queries * sizes[0] * query.itemsize
    return max(1, min(most, room // (strip * sum(sizes) * query.itemsize)))


def strip_of(padded: int) -> int:
    """The keys of a strip. Keys of more than 256 channels are so large that a small GPU has room for fewer."""
    return STRIP if padded <= WIDE else STRIP // 2


@cache
def _shared_memory(device: torch.device) -> int:
    number = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(number)["max_shared_mem"])


def dot_precision(dtype: torch.dtype) -> str:
    """The `input_precision` of `tl.dot`: float32 is not rounded to TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def mask_of(kind: AttentionKind) -> tuple[int, int]:
    """(the span, the number of the mask) that the kernels take for a window or a chunk."""
    if kind.window is not None and kind.chunk is not None:
        raise ValueError("the kernels compute windows or chunks, not windows within chunks")
    if kind.window is not None:
        return kind.window, WINDOW
    return (kind.chunk, CHUNK) if kind.chunk is not None else (0, 0)


def attend_packed(
    query: Tensor,  # [T, heads, channels]
    key: Tensor,  # [T, kv heads, channels]; tokens may lie apart, here and in the values
    value: Tensor,  # [T, kv heads, value channels]
    starts: Tensor,  # [S + 1] int32: where each sequence starts, and T
    longest: int,
    scale: float,
    kind: AttentionKind = PLAIN,
) -> tuple[Tensor, Tensor]:
    """(the mixed values [T, heads, value channels], the logs of the sums of exp [heads, T]) of attention within packed
    sequences."""
    tokens, heads, channels = query.shape
    query, (key, value) = query.contiguous(), (_heads_together(one) for one in (key, value))
    out = query.new_empty((tokens, heads, value.shape[2]))
    sums = torch.empty((heads, tokens), dtype=torch.float32, device=query.device)
    sizes, (span, mask) = (padded_channels(channels), padded_channels(value.shape[2])), mask_of(kind)
    tile, strip = TILE if max(sizes) <= WIDE else NARROW, strip_of(max(sizes))
    per_sequence, sinks = triton.cdiv(longest, tile), kind.sinks if kind.sinks is not None else query
    _attend[((len(starts) - 1) * per_sequence, heads)](
        query, key, value, sinks, starts, starts, starts, starts, starts, out, sums,
        0, 0, 0, span, key.stride(0), value.stride(0), tokens, per_sequence, scale,
        heads, key.shape[1], channels, sizes[0], value.shape[2], sizes[1], 1, SPLIT, strip, tile, 1,
        mask, kind.softcap or 0.0, kind.sinks is not None, False, dot_precision(query.dtype),
        num_warps=WARPS, num_stages=stages_that_fit(query, sizes, strip, tile, STAGES), **UNFUSED,
    )  # fmt: skip
    return out, sums


def attend_to_cache(
    query: Tensor,  # [T, heads, channels]
    addresses: Tensor,  # [layers, 2] int64
    layer: int,
    kv_heads: int,
    block: int,
    tiles: Tensor,  # [tiles, 2] int32: the sequence, and its first query
    # [S, 4] int32: first token in `query`, number of tokens, position of the first, length of the prompt
    sequences: Tensor,
    prompt_tables: Tensor,  # [S, blocks] int32
    own_tables: Tensor,
    scale: float,
    kind: AttentionKind = PLAIN,
    value_channels: int | None = None,  # as keys have
) -> Tensor:
    """Attention of the new tokens of all sequences, which lie one after the other, to all tokens of their sequences in
    a paged cache: [T, heads, value channels]."""
    tokens, heads, channels = query.shape
    query, values = query.contiguous(), value_channels or channels
    out = query.new_empty((tokens, heads, values))
    sizes, (span, mask) = (padded_channels(channels), padded_channels(values)), mask_of(kind)
    tile, strip = TILE if max(sizes) <= WIDE else NARROW, strip_of(max(sizes))
    parts, sinks = TILE // tile, kind.sinks if kind.sinks is not None else query
    _attend[(len(tiles) * parts, heads)](
        query, query, query, sinks, addresses, tiles, sequences, prompt_tables, own_tables, out, query,
        layer, prompt_tables.shape[1], own_tables.shape[1], span, 0, 0, tokens, 0, scale,
        heads, kv_heads, channels, sizes[0], values, sizes[1], block, SPLIT, strip, tile, parts,
        mask, kind.softcap or 0.0, kind.sinks is not None, True, dot_precision(query.dtype),
        num_warps=WARPS, num_stages=stages_that_fit(query, sizes, strip, tile, STAGES), **UNFUSED,
    )  # fmt: skip
    return out


def padded_channels(channels: int) -> int:
    return max(16, int(triton.next_power_of_2(channels)))


def _heads_together(states: Tensor) -> Tensor:
    """The same numbers, with the heads of a token one after another."""
    return states if states[:1].is_contiguous() else states.contiguous()
