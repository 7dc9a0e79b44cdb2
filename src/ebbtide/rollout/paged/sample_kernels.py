"""Samples tokens as rollout/sampling.py does, in two Triton kernels that read the logits once: the first sums every
chunk of the vocabulary, the second finds the chunk and the token that a uniform number points to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.rollout.sampling import integer_probs

CHUNK = 4096  # tokens of the vocabulary that a program reads


@triton.jit
def _capped_and_scaled(raw, scale, softcap, capped: tl.constexpr):
    """Applies the soft cap and the scale of the model family to logits."""
    if capped:
        raw = softcap * (2.0 / (1.0 + tl.exp(-2.0 * raw / softcap)) - 1.0)
    return raw * scale


@triton.jit(do_not_specialize=["vocabulary", "chunks"])
def _sum_chunks(
    logits,
    temperatures,
    thresholds,
    stats,
    vocabulary,
    chunks,
    scale,
    softcap,
    capped: tl.constexpr,
    cut: tl.constexpr,
    chunk: tl.constexpr,
):
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = number * chunk + tl.arange(0, chunk)
    there = token < vocabulary
    raw = tl.load(logits + row * vocabulary + token, mask=there, other=-float("inf")).to(tl.float32)
    value = tl.where(there, _capped_and_scaled(raw, scale, softcap, capped), -float("inf"))
    temperature = tl.load(temperatures + row)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    largest = tl.max(value, 0)
    at = number * chunk + tl.argmax(value, 0)
    plain = tl.sum(tl.exp(value - largest), 0)
    tempered = tl.exp((value - largest) / divisor)
    whole = tl.sum(tempered, 0)
    kept = whole
    if cut:
        kept = tl.sum(tl.where(raw >= tl.load(thresholds + row), tempered, 0.0), 0)
    place = stats + (row * chunks + number) * 6
    tl.store(place, largest)
    tl.store(place + 1, at.to(tl.float32, bitcast=True))
    tl.store(place + 2, plain)
    tl.store(place + 3, whole)
    tl.store(place + 4, kept)


@triton.jit(do_not_specialize=["vocabulary", "chunks", "batch"])
def _sample(
    logits,  # [B, V]
    temperatures,  # [B]
    thresholds,  # [B]
    uniform,  # [2, B]: two summands of each number, as one float32 is too coarse for a large vocabulary
    stats,  # [B, chunks, 6]
    rows,  # [B]: where in `last` each token is written
    last,  # [rows] int64
    result,  # [3, B] fp32: tokens (as integers), log-probs at the temperature, and at 1
    vocabulary,
    chunks,
    batch,
    scale,
    softcap,
    capped: tl.constexpr,
    cut: tl.constexpr,
    chunk: tl.constexpr,
    padded: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, padded)
    there = number < chunks
    place = stats + (row * chunks + number) * 6
    temperature = tl.load(temperatures + row)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    largest = tl.load(place, mask=there, other=-float("inf"))
    highest = tl.max(largest, 0)
    plain = tl.sum((tl.load(place + 2, mask=there, other=0.0) * tl.exp(largest - highest)).to(tl.float64), 0)
    shrink = tl.exp((largest - highest) / divisor)
    whole = tl.sum((tl.load(place + 3, mask=there, other=0.0) * shrink).to(tl.float64), 0)
    if temperature > 0:
        kept = (tl.load(place + 4, mask=there, other=0.0) * shrink).to(tl.float64)
        upto = tl.cumsum(kept, 0)
        total = tl.sum(kept, 0)
        target = (tl.load(uniform + row).to(tl.float64) + tl.load(uniform + batch + row).to(tl.float64)) * total
        # The first chunk whose cumulative sum passes the number; by rounding, none may: then the last that has any.
        passed = (upto > target) & (kept > 0)
        found = tl.min(tl.where(passed, number, padded), 0)
        found = tl.where(found < padded, found, tl.max(tl.where(kept > 0, number, 0), 0))
        before = tl.sum(tl.where(number < found, kept, 0.0), 0)
        token = found * chunk + tl.arange(0, chunk)
        real = token < vocabulary
        raw = tl.load(logits + row * vocabulary + token, mask=real, other=-float("inf")).to(tl.float32)
        weight = tl.where(real, tl.exp((_capped_and_scaled(raw, scale, softcap, capped) - highest) / divisor), 0.0)
        if cut:
            weight = tl.where(raw >= tl.load(thresholds + row), weight, 0.0)
        inner = tl.cumsum(weight.to(tl.float64), 0) + before
        hit = (inner > target) & (weight > 0)
        chosen = tl.min(tl.where(hit, token, 2147483647), 0)
        chosen = tl.where(chosen < 2147483647, chosen, tl.max(tl.where(weight > 0, token, 0), 0))
    else:
        at = tl.load(place + 1, mask=there, other=0.0).to(tl.int32, bitcast=True)
        chosen = tl.min(tl.where(there & (largest == highest), at, 2147483647), 0)
        chosen = tl.where(chosen < 2147483647, chosen, 0)
    mine = _capped_and_scaled(tl.load(logits + row * vocabulary + chosen).to(tl.float32), scale, softcap, capped)
    tl.store(last + tl.load(rows + row), chosen.to(tl.int64))
    tl.store(result + row, chosen.to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(result + batch + row, (mine - highest) / divisor - tl.log(whole.to(tl.float32)))
    tl.store(result + 2 * batch + row, mine - highest - tl.log(plain.to(tl.float32)))


def sample_tokens(
    logits: Tensor,  # [B, V]
    temperatures: Tensor,  # [B]: 0 is greedy
    thresholds: Tensor | None,  # [B]: logits below it are never chosen
    uniform: Tensor,  # [2, B]
    rows: Tensor,  # [B] int32: where in `last` each token is written
    last: Tensor,  # [rows] int64: the newest token of the sample in each row
    result: Tensor,  # [3, B] fp32: tokens (as integers), log-probs at the temperature, and at 1
    scale: float,
    softcap: float | None,
) -> None:
    """Samples one token for each row of logits. Tokens and log-probs are written to `result`, tokens also to `last`."""
    batch, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    stats = torch.empty((batch, chunks, 6), dtype=torch.float32, device=logits.device)
    least = thresholds if thresholds is not None else temperatures
    shape = (scale, softcap or 1.0, softcap is not None, thresholds is not None, CHUNK)
    _sum_chunks[(batch, chunks)](logits, temperatures, least, stats, vocabulary, chunks, *shape, num_warps=4)
    _sample[(batch,)](
        logits, temperatures, least, uniform, stats, rows, last, result, vocabulary, chunks, batch, *shape,
        triton.next_power_of_2(chunks), num_warps=4,
    )  # fmt: skip


def logit_thresholds(
    logits: Tensor,  # [B, V]
    temperatures: Tensor,  # [B]
    top_k: Tensor,  # [B]: 0 is all
    top_p: Tensor,  # [B]
    min_p: Tensor,  # [B]
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Returns [B]: for each row the smallest logit that its top-k, top-p and min-p keep."""
    ordered = logits.float().sort(-1, descending=True).values
    values = (ordered if softcap is None else (ordered / softcap).tanh() * softcap) * scale
    vocabulary = logits.shape[-1]
    kth = ordered.gather(-1, (top_k.where(top_k > 0, vocabulary).clamp(1, vocabulary).long() - 1)[:, None])
    values = (values / temperatures.where(temperatures > 0, 1.0)[:, None]).masked_fill(ordered < kth, -torch.inf)
    parts = integer_probs(values)
    most = top_p[:, None].double() * parts.sum(-1, keepdim=True)
    inside = (parts.cumsum(-1) - parts < most) & (values >= values[:, :1] + min_p[:, None].log()) & (ordered >= kth)
    return ordered.gather(-1, (inside.sum(-1).clamp(min=1) - 1)[:, None])[:, 0]
