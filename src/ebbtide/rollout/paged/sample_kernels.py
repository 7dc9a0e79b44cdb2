"""Samples tokens as rollout/sampling.py does, in two Triton kernels that read the logits once: the first sums every
chunk of the vocabulary, the second finds the chunk and the token that a uniform number points to. The log-probs are
those of training, to the bit (policy/logit_kernels.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.model.block_kernels import UNFUSED
from ebbtide.model.dependent_launch import wait_for_results
from ebbtide.model.launch import launch_options, starts_early
from ebbtide.policy.logit_kernels import CHUNK, LOWEST, cap_logits, load_chunk, load_sums, log_of_sum, sum_chunks
from ebbtide.rollout.sampling import integer_probs

LAST = tl.constexpr(2147483647)  # no token has this number


@triton.jit(do_not_specialize=["chunks", "batch", "cuts"])
def _sample(
    logits,  # [B, V]
    temperatures,  # [B]
    scales,  # [B]
    thresholds,  # [B]
    uniform,  # [2, B]: two summands of each number, as one float32 is too coarse for a large vocabulary
    stats,  # [B, SUMS, chunks]
    rows,  # [B]: where in `last` each token is written
    last,  # [rows] int64
    result,  # [3, B] fp32: tokens (as integers), log-probs at the temperature, and at 1
    vocabulary,
    chunks,
    batch,
    plain_scale,
    softcap,
    cuts,
    capped: tl.constexpr,
    chunk: tl.constexpr,
    padded: tl.constexpr,
    early: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait_for_results(early)
    temperature, scale, place = tl.load(temperatures + row), tl.load(scales + row), tl.load(rows + row)
    coarse, fine = tl.load(uniform + row), tl.load(uniform + batch + row)
    largest = load_sums(stats, row, chunks, 0, LOWEST, padded)
    totals = load_sums(stats, row, chunks, 1, 0.0, padded)
    plain_totals = load_sums(stats, row, chunks, 3, 0.0, padded)
    kept = load_sums(stats, row, chunks, 4, 0.0, padded)
    number = tl.arange(0, padded)
    highest = tl.max(largest, 0)
    top, plain_top = highest * scale, highest * plain_scale
    kept = kept.to(tl.float64) * tl.exp(largest * scale - top)
    target = (coarse.to(tl.float64) + fine.to(tl.float64)) * tl.sum(kept, 0)
    # The first chunk whose cumulative sum passes the number; by rounding, none may: then the last that has any. Greedy
    # sampling is of the first chunk that has the largest logit.
    passed = (tl.cumsum(kept, 0) > target) & (kept > 0)
    if temperature == 0:
        passed = (largest == highest) & (number < chunks)
    found = tl.min(tl.where(passed, number, padded), 0)
    found = tl.where(found < padded, found, tl.max(tl.where(kept > 0, number, 0), 0))
    before = tl.sum(tl.where(number < found, kept, 0.0), 0)
    token, there, raw, value = load_chunk(logits, row, found, vocabulary, softcap, capped, chunk)
    weight = tl.where(there, tl.exp(value * scale - top), 0.0)
    if cuts:
        weight = tl.where(raw >= tl.load(thresholds + row), weight, 0.0)
    hit = (tl.cumsum(weight.to(tl.float64), 0) + before > target) & (weight > 0)
    if temperature == 0:
        hit = there & (value == tl.max(value, 0))  # `highest` comes from a kernel that may round the soft cap otherwise
    chosen = tl.min(tl.where(hit, token, LAST), 0)
    chosen = tl.where(chosen < LAST, chosen, tl.max(tl.where(weight > 0, token, 0), 0))
    mine, _ = cap_logits(tl.load(logits + row * vocabulary + chosen).to(tl.float32), softcap, capped)
    log_sum = log_of_sum(largest, totals, top, scale)
    plain_log_sum = log_of_sum(largest, plain_totals, plain_top, plain_scale)
    tl.store(last + place, chosen.to(tl.int64))
    tl.store(result + row, chosen.to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(result + batch + row, mine * scale - top - log_sum)
    tl.store(result + 2 * batch + row, mine * plain_scale - plain_top - plain_log_sum)


def sample_tokens(
    logits: Tensor,  # [B, V]
    temperatures: Tensor,  # [B]: 0 is greedy
    scales: Tensor,  # [B]: what logits are multiplied with at the temperature; greedy: at 1
    thresholds: Tensor | None,  # [B]: logits below it are never chosen
    uniform: Tensor,  # [2, B]
    rows: Tensor,  # [B] int32: where in `last` each token is written
    last: Tensor,  # [rows] int64: the newest token of the sample in each row
    result: Tensor,  # [3, B] fp32: tokens (as integers), log-probs at the temperature, and at 1
    plain_scale: float,  # of logits at temperature 1
    softcap: float | None,
) -> None:
    """Samples one token for each row of logits. Tokens and log-probs are written to `result`, tokens also to `last`."""
    batch, vocabulary = logits.shape
    stats = sum_chunks(logits, scales, plain_scale, softcap, thresholds)
    chunks, early = stats.shape[-1], starts_early(logits)
    _sample[(batch,)](
        logits, temperatures, scales, scales if thresholds is None else thresholds, uniform, stats, rows, last, result,
        vocabulary, chunks, batch, plain_scale, softcap or 0.0, int(thresholds is not None), softcap is not None,
        CHUNK, triton.next_power_of_2(chunks), early, num_warps=8, **launch_options(early), **UNFUSED,
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
