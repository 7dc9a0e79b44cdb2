"""The routing of tokens to experts in block_reference.py as Triton kernels: one chooses and weighs the experts of a
token, and one sorts the visits by expert. Neither depends on how many tokens there are, so that decode has the bits of
training.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.model.block_kernels import warps
from ebbtide.model.dependent_launch import wait_for_results
from ebbtide.model.launch import Launcher

CHUNK = 2048  # Visits that a program looks at together: those of a decode pass, in most.

_NEVER = tl.constexpr(-(2**63))  # Lies before each key.


@triton.jit
def _keys(logit, expert, experts: tl.constexpr, padded: tl.constexpr):
    """Integers in the order of float32 numbers, and of equal ones the first as the largest: no two are the same. What
    is not a number lies at an end, so that each token has its experts whatever the logits are."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # The larger a negative number's bits, the smaller it is.
    return tl.where(expert < experts, (ordered.to(tl.int64) << 32) + (padded - expert), _NEVER)


@triton.jit
def _route(
    logits,  # [T, experts]
    chosen,  # [T, count]
    weights,  # [T, count]
    experts: tl.constexpr,
    padded: tl.constexpr,
    count: tl.constexpr,
    normalizes: tl.constexpr,
    early: tl.constexpr,
):
    wait_for_results(early)
    token, expert = tl.program_id(0).to(tl.int64), tl.arange(0, padded)
    logit = tl.load(logits + token * experts + expert, mask=expert < experts, other=float("-inf")).to(tl.float32)
    key = _keys(logit, expert, experts, padded)
    place = tl.full([padded], -1, tl.int32)  # of an expert among those of the token
    for each in tl.static_range(count):
        best = tl.max(tl.where(place < 0, key, _NEVER), 0)
        place = tl.where(key == best, each, place)
    visited = place >= 0
    share = tl.exp(logit - tl.max(logit, 0))
    total = tl.sum(tl.where(visited, share, 0.0), 0) if normalizes else tl.sum(share, 0)
    weight = (share / total).to(logits.dtype.element_ty).to(tl.float32)
    tl.store(chosen + token * count + place, expert, mask=visited)
    tl.store(weights + token * count + place, weight, mask=visited)


_launch_route = Launcher(_route, dependent=True)


def route(logits: Tensor, count: int, *, normalizes: bool) -> tuple[Tensor, Tensor]:
    """The same as `block_reference.route`."""
    tokens, experts = logits.shape
    chosen = torch.empty((tokens, count), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, count), dtype=torch.float32, device=logits.device)
    padded = triton.next_power_of_2(experts)
    tensors = logits.contiguous(), chosen, weights
    _launch_route(tokens, tensors, (), experts, padded, count, normalizes, warps=warps(padded))
    return chosen, weights


@triton.jit
def _route_backward(
    logits,  # [T, experts]
    chosen,  # [T, count]
    grad,  # [T, count]
    out,  # [T, experts]
    experts: tl.constexpr,
    padded: tl.constexpr,
    count: tl.constexpr,
    normalizes: tl.constexpr,
):
    token, expert = tl.program_id(0).to(tl.int64), tl.arange(0, padded)
    inside = expert < experts
    logit = tl.load(logits + token * experts + expert, mask=inside, other=float("-inf")).to(tl.float32)
    share = tl.exp(logit - tl.max(logit, 0))
    probability = share / tl.sum(share, 0)
    above, visited = tl.zeros([padded], tl.float32), expert < 0
    for place in tl.static_range(count):
        own = expert == tl.load(chosen + token * count + place)
        above = tl.where(own, tl.load(grad + token * count + place), above)
        visited |= own
    if normalizes:
        total = tl.sum(tl.where(visited, probability, 0.0), 0)
        above = tl.where(visited, (above - tl.sum(above * probability, 0) / total) / total, 0.0)
    below = probability * (above - tl.sum(above * probability, 0))
    tl.store(out + token * experts + expert, below.to(out.dtype.element_ty), mask=inside)


_launch_route_backward = Launcher(_route_backward)


def route_backward(logits: Tensor, chosen: Tensor, grad: Tensor, *, normalizes: bool) -> Tensor:
    """The same as `block_reference.route_backward`."""
    tokens, experts = logits.shape
    logits = logits.contiguous()
    out, padded = torch.empty_like(logits), triton.next_power_of_2(experts)
    tensors = logits, chosen.contiguous(), grad.contiguous(), out
    _launch_route_backward(tokens, tensors, (), experts, padded, chosen.shape[1], normalizes, warps=warps(padded))
    return out


@triton.jit(do_not_specialize=["visits"])
def _group(
    chosen,  # [visits]
    order,  # [visits]
    places,  # [visits]
    ends,  # [experts]
    visits,
    chunk: tl.constexpr,
    early: tl.constexpr,
):
    """The rows of one expert. It counts the visits of all experts itself, so that it waits for no other program."""
    wait_for_results(early)
    expert, experts = tl.program_id(0), tl.num_programs(0)
    before, until = tl.zeros([chunk], tl.int32), tl.zeros([chunk], tl.int32)
    for first in range(0, visits, chunk):
        visit = first + tl.arange(0, chunk)
        visited = tl.load(chosen + visit, mask=visit < visits, other=experts)
        before += (visited < expert).to(tl.int32)
        until += (visited <= expert).to(tl.int32)
    tl.store(ends + expert, tl.sum(until, 0))
    row = tl.sum(before, 0)
    for first in range(0, visits, chunk):
        visit = first + tl.arange(0, chunk)
        own = tl.load(chosen + visit, mask=visit < visits, other=experts) == expert
        place = row + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(order + place, visit.to(tl.int64), mask=own)
        tl.store(places + visit, place.to(tl.int64), mask=own)
        row += tl.sum(own.to(tl.int32), 0)


_launch_group = Launcher(_group, dependent=True)


def group(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `block_reference.group`."""
    visits = chosen.numel()
    order = torch.empty(visits, dtype=torch.int64, device=chosen.device)
    places = torch.empty(chosen.shape, dtype=torch.int64, device=chosen.device)
    ends = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    tensors = chosen.contiguous(), order, places, ends
    _launch_group(experts, tensors, (visits,), CHUNK, warps=warps(CHUNK))
    return order, places, ends
