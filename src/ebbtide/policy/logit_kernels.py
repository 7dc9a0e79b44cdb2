"""What the trainer's log-probs and the sampler share: the sums over each chunk of the vocabulary, of one read of the
logits, and how those of a row are merged.

A program has one chunk of one row, so that a few rows fill a GPU too. The sampler and the trainer launch the same
compiled kernel, whatever their rows. A merge has the same bits in any kernel that is compiled `UNFUSED`. So the
log-probs of both are the same, to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ebbtide.model.dependent_launch import wait_for_results
from ebbtide.model.launch import launch_options, starts_early

CHUNK = 4096  # tokens of the vocabulary that a program reads
WARPS = 4  # 17 instructions for each logit; 8 have 22, as more threads add up fewer each
SUMS = tl.constexpr(5)
"""The numbers of each chunk, in this order: its largest logit, with the soft cap and without a scale; and with d = the
scaled logit - the largest one scaled, the sums of exp d, of exp d * d, of exp d at the plain scale, and of exp d of the
tokens that are kept."""
LOWEST = tl.constexpr(-1e30)  # Of a chunk without any token, so that nothing subtracts infinities.
PARTS = tl.constexpr(2.0**32)


@triton.jit
def cap_logits(x, softcap, capped: tl.constexpr):
    """Logits after the soft cap, and its slope."""
    slope = 1.0
    if capped:
        curve = libdevice.tanh(x / softcap)
        slope = 1.0 - curve * curve
        x = curve * softcap
    return x, slope


@triton.jit
def load_chunk(logits, row, number, columns, softcap, capped: tl.constexpr, chunk: tl.constexpr):
    """The tokens of a chunk, which of them there are, and their logits as they are and after the soft cap."""
    token = number * chunk + tl.arange(0, chunk)
    there = token < columns
    raw = tl.load(logits + row * columns + token, mask=there, other=0.0).to(tl.float32)
    value, _ = cap_logits(raw, softcap, capped)
    return token, there, raw, tl.where(there, value, LOWEST)


@triton.jit
def load_sums(stats, row, chunks, which: tl.constexpr, missing: tl.constexpr, padded: tl.constexpr):
    """One of the numbers of all chunks of a row."""
    number = tl.arange(0, padded)
    return tl.load(stats + (row * SUMS + which) * chunks + number, mask=number < chunks, other=missing)


@triton.jit
def log_of_sum(largest, sums, top, scale):
    """The log of the sum of exp(scaled logit - top) over the vocabulary, of the sums of its chunks. They are added as
    whole numbers of 2^-32, below 2^53 for up to 2^21 tokens: float64 is exact for these, so that every kernel has the
    same bits, in whatever order it adds."""
    parts = sums.to(tl.float64) * tl.exp(largest * scale - top).to(tl.float64)
    return tl.log((tl.sum(tl.floor(parts * PARTS), 0) / PARTS).to(tl.float32))


@triton.jit(do_not_specialize=["chunks", "cuts"])
def _sum_chunks(
    logits,  # [rows, columns]
    scales,  # [rows]
    thresholds,  # [rows], where some tokens are left out
    stats,  # [rows, SUMS, chunks]
    columns,
    chunks,
    plain_scale,
    softcap,
    cuts,
    capped: tl.constexpr,
    chunk: tl.constexpr,
    early: tl.constexpr,
):
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_results(early)
    scale = tl.load(scales + row)
    _, _, raw, value = load_chunk(logits, row, number, columns, softcap, capped, chunk)
    largest = tl.maximum(tl.max(value, 0), LOWEST)
    below = value * scale - largest * scale
    grown = tl.exp(below)
    total, weighted = tl.sum(grown, 0), tl.sum(grown * below, 0)
    kept, plain = total, total
    if cuts:
        kept = tl.sum(tl.where(raw >= tl.load(thresholds + row), grown, 0.0), 0)
    if scale != plain_scale:
        plain = tl.sum(tl.exp(value * plain_scale - largest * plain_scale), 0)
    place = stats + row * SUMS * chunks + number
    tl.store(place, largest)
    tl.store(place + chunks, total)
    tl.store(place + 2 * chunks, weighted)
    tl.store(place + 3 * chunks, plain)
    tl.store(place + 4 * chunks, kept)


def sum_chunks(
    logits: Tensor,  # [rows, columns]
    scales: Tensor,  # [rows] fp32
    plain_scale: float,
    softcap: float | None,
    thresholds: Tensor | None = None,  # [rows]: logits below it are not kept
) -> Tensor:
    """Returns the sums of each chunk, [rows, SUMS, chunks]."""
    rows, columns = logits.shape
    chunks = triton.cdiv(columns, CHUNK)
    stats = torch.empty((rows, SUMS.value, chunks), dtype=torch.float32, device=logits.device)
    early = starts_early(logits)
    _sum_chunks[(rows, chunks)](
        logits, scales, scales if thresholds is None else thresholds, stats, columns, chunks, plain_scale,
        softcap or 0.0, int(thresholds is not None), softcap is not None, CHUNK, early,
        num_warps=WARPS, **launch_options(early),
    )  # fmt: skip
    return stats
