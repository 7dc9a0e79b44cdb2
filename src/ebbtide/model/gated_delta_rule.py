"""The gated delta rule in chunks of tokens, with a backward of its own: in plain torch, and on a GPU, for inputs of 16
bits, by the Triton kernels of delta_kernels.py.

A head has a state S [K, V]. A token with query q, key k and value v, decay g <= 0 and rate b changes it to

    S = exp(g) S + k (b (v - exp(g) S.T k)).T        and reads        o = S.T q

Within a chunk, where G is the sum of g up to a token, and D[i, j] = exp(G[i] - G[j]) for j <= i, all tokens are
computed at once: with A = b K K.T * D below the diagonal and T = (1 + A)^-1,

    U = T (b V)    W = T (b exp(G) K)    V' = U - W S    O = exp(G) Q S + (Q K.T * D) V'

and the next chunk begins with exp(G[-1]) S + (exp(G[-1] - G) K).T V' (Yang, Kautz and Hatamizadeh, Gated Delta
Networks, 2024). The backward gets the inputs alone, and computes the rest again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ebbtide.model.delta_passes import DeltaPasses
from ebbtide.model.delta_sizes import EPSILON, KERNEL_CHANNELS

CHUNK = 64


def gated_delta_rule(
    query: Tensor,  # [B, T, heads, K]
    key: Tensor,
    value: Tensor,  # [B, T, heads, V]
    g: Tensor,  # [B, T, heads]
    beta: Tensor,
    state: Tensor | None = None,  # [B, heads, K, V]
    *,
    normalizes: bool = False,
    plain: bool = False,
) -> tuple[Tensor, Tensor]:
    """(the outputs [B, T, heads, V], the states after the last tokens), from these states on, or none. `normalizes`:
    whether queries and keys are divided by their norms. Queries are divided by the root of K. `plain`: in plain torch,
    also where there are kernels. Gradients are for the inputs without a state, and of the outputs alone."""
    inputs = query, key, value, g, beta
    by_kernels = not plain and has_kernels(query, key, value)
    if torch.is_grad_enabled() and any(one.requires_grad for one in inputs):
        assert state is None, "there are no gradients from a state on"
        output, last = _GatedDeltaRule.apply(*inputs, normalizes, by_kernels)  # type: ignore[no-untyped-call]
        return output, last
    return _forward(*inputs, state, normalizes=normalizes, by_kernels=by_kernels)


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        normalizes: bool,
        by_kernels: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(query, key, value, g, beta)
        ctx.normalizes, ctx.by_kernels = normalizes, by_kernels
        output, last = _forward(query, key, value, g, beta, None, normalizes=normalizes, by_kernels=by_kernels)
        ctx.mark_non_differentiable(last)
        return output, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs: tuple[Tensor, ...] = ctx.saved_tensors
        if ctx.by_kernels:
            return *DeltaPasses(*inputs, normalizes=ctx.normalizes).backward(grads[0]), None, None
        chunks = _Chunks.cut(*inputs, normalizes=ctx.normalizes)
        dquery, dkey, dvalue, dg, dbeta = _gradients(chunks, _cut(grads[0]))
        if ctx.normalizes:
            dquery = _normalized_backward(dquery, chunks.query, chunks.query_factor, chunks.scale)
            dkey = _normalized_backward(dkey, chunks.key, chunks.key_factor, 1.0)
        else:
            dquery = dquery * chunks.scale
        found = zip((dquery, dkey, dvalue, dg[..., None], dbeta[..., None]), inputs, strict=True)
        return *(_joined(grad, one).view_as(one) for grad, one in found), None, None


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    *,
    normalizes: bool,
    by_kernels: bool,
) -> tuple[Tensor, Tensor]:
    if by_kernels:
        return DeltaPasses(query, key, value, g, beta, normalizes=normalizes).forward(state)
    chunks = _Chunks.cut(query, key, value, g, beta, normalizes=normalizes)
    run = _run(chunks, state)
    return _joined(run.output, query), run.last.unflatten(0, (query.shape[0], -1))


def has_kernels(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether kernels compute the rule for these inputs."""
    on_gpu = query.is_cuda or query.is_meta  # A plan's trace is of a GPU.
    alike = query.dtype == key.dtype == value.dtype
    return on_gpu and alike and query.numel() > 0 and kernels_compute(query.dtype, query.shape[-1], value.shape[-1])


def kernels_compute(dtype: torch.dtype, *channels: int) -> bool:
    """Whether there are kernels for heads with so many channels."""
    return dtype.itemsize == 2 and all(count in KERNEL_CHANNELS for count in channels)


@dataclass(frozen=True)
class _Chunks:
    """The inputs in chunks, [B x heads, chunks, CHUNK, ...], in float32 or wider."""

    query: Tensor
    """Normalized if asked for, and divided by the root of K."""
    key: Tensor
    value: Tensor
    decay: Tensor
    """[..., CHUNK]: the sum of g from the chunk's first token on."""
    beta: Tensor
    query_factor: Tensor
    """What normalizes queries [..., CHUNK, 1]."""
    key_factor: Tensor
    scale: float

    @staticmethod
    def cut(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, normalizes: bool) -> _Chunks:
        q, k, v, decay, b = (_cut(one) for one in (query, key, value, g[..., None], beta[..., None]))
        scale, of_q, of_k = query.shape[-1] ** -0.5, q, k
        if normalizes:
            of_q, of_k = (one.square().sum(-1, keepdim=True).add_(EPSILON).rsqrt_() for one in (q, k))
            q, k = q.mul_(of_q), k.mul_(of_k)
        return _Chunks(q.mul_(scale), k, v, decay.squeeze(-1).cumsum(-1), b.squeeze(-1), of_q, of_k, scale)

    @cached_property
    def within(self) -> Tensor:
        """D [..., CHUNK, CHUNK]."""
        later = torch.ones((CHUNK, CHUNK), dtype=torch.bool, device=self.decay.device).triu(1)
        between = self.decay[..., :, None] - self.decay[..., None, :]
        return between.masked_fill_(later, -torch.inf).exp_()

    @cached_property
    def keys(self) -> Tensor:
        """K K.T * D."""
        products: Tensor = self.key @ self.key.mT
        return products.mul_(self.within)

    @cached_property
    def scores(self) -> Tensor:
        """Q K.T * D."""
        products: Tensor = self.query @ self.key.mT
        return products.mul_(self.within)

    @cached_property
    def solution(self) -> Tensor:
        """T."""
        one = torch.eye(CHUNK, dtype=self.keys.dtype, device=self.keys.device).expand_as(self.keys)
        system = self.keys * self.beta[..., None]  # Its diagonal is not read, nor what is above.
        found: Tensor = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)
        return found

    @cached_property
    def since_start(self) -> Tensor:
        """exp(G) [..., CHUNK, 1]."""
        return self.decay.exp()[..., None]

    @cached_property
    def until_end(self) -> Tensor:
        """exp(G[-1] - G) [..., CHUNK, 1]."""
        return (self.decay[..., -1:] - self.decay).exp()[..., None]

    @cached_property
    def whole(self) -> Tensor:
        """exp(G[-1]) [..., 1, 1]."""
        return self.since_start[..., -1:, :]

    @cached_property
    def reading(self) -> Tensor:
        """exp(G) Q: what reads the state before the chunk."""
        return self.query * self.since_start

    @cached_property
    def writing(self) -> Tensor:
        """exp(G[-1] - G) K: what writes to the state after the chunk."""
        return self.key * self.until_end

    @cached_property
    def new(self) -> Tensor:
        """U."""
        return self.solution @ (self.value * self.beta[..., None])

    @cached_property
    def known(self) -> Tensor:
        """W."""
        return self.solution @ (self.key * (self.beta[..., None] * self.since_start))


@dataclass(frozen=True)
class _Run:
    output: Tensor
    states: Tensor
    """[..., K, V]: before each chunk."""
    written: Tensor
    """V' [..., CHUNK, V]."""
    last: Tensor
    """[B x heads, K, V]"""


def _cut(x: Tensor) -> Tensor:
    """Sequences [B, T, heads, channels] as chunks, padded with zeros: a copy."""
    x = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK)).unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide, memory_format=torch.contiguous_format, copy=True).flatten(0, 1)


def _joined(x: Tensor, like: Tensor) -> Tensor:
    """Chunks as sequences [B, T, heads, channels] again, without padding, of the type of `like`."""
    rows: Tensor = x.flatten(1, 2)[:, : like.shape[1]].unflatten(0, (like.shape[0], -1)).transpose(1, 2)
    return rows.to(like.dtype, memory_format=torch.contiguous_format)


def _run(chunks: _Chunks, state: Tensor | None) -> _Run:
    shape = chunks.key.shape[0], chunks.key.shape[-1], chunks.value.shape[-1]
    now = chunks.key.new_zeros(shape) if state is None else state.flatten(0, 1).to(chunks.key.dtype)
    states, written = [], []
    for number in range(chunks.key.shape[1]):
        states.append(now)
        written.append(torch.baddbmm(chunks.new[:, number], chunks.known[:, number], now, alpha=-1))
        now = torch.baddbmm(now * chunks.whole[:, number], chunks.writing[:, number].mT, written[-1])
    before, values = torch.stack(states, 1), torch.stack(written, 1)
    return _Run((chunks.reading @ before).add_(chunks.scores @ values), before, values, now)


def _gradients(chunks: _Chunks, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, values, g and beta, in chunks, for that of the outputs."""
    run, beta, within = _run(chunks, None), chunks.beta[..., None], chunks.within
    rate = beta * chunks.since_start
    # Backwards from chunk to chunk: of V', and of the state after each chunk.
    dwritten, by_reading = chunks.scores.mT @ grad, chunks.reading.mT @ grad
    dstates = torch.empty_like(run.states)
    dstate = torch.zeros_like(run.last)
    for number in reversed(range(grad.shape[1])):
        dstates[:, number] = dstate
        dwritten[:, number].baddbmm_(chunks.writing[:, number], dstate)
        dstate = dstate * chunks.whole[:, number] + by_reading[:, number]
        dstate.baddbmm_(chunks.known[:, number].mT, dwritten[:, number], alpha=-1)
    # All chunks at once.
    before = run.states.mT
    dreading, dwriting, dscores = grad @ before, run.written @ dstates.mT, grad @ run.written.mT
    dvalue = chunks.solution.mT @ dwritten  # of b V
    dknown = (chunks.solution.mT @ (dwritten @ before)).neg_()  # of b exp(G) K
    dsystem = (dvalue @ chunks.new.mT).add_(dknown @ chunks.known.mT).neg_().tril_(-1)
    dbeta = (dvalue * chunks.value).sum(-1) + (dsystem * chunks.keys).sum(-1)
    by_rate = (dknown * chunks.key).sum(-1)
    dbeta += by_rate * chunks.since_start[..., 0]
    dsystem *= beta
    by_pair = (dscores * chunks.scores).add_(dsystem * chunks.keys)
    dscores *= within
    dsystem *= within
    dquery = (dscores @ chunks.key).add_(dreading * chunks.since_start)
    dkey = (dscores.mT @ chunks.query).add_((dsystem + dsystem.mT) @ chunks.key)
    dkey.addcmul_(dknown, rate).addcmul_(dwriting, chunks.until_end)
    by_writing = (dwriting * chunks.writing).sum(-1)
    ddecay = by_pair.sum(-1) - by_pair.sum(-2) + (dreading * chunks.reading).sum(-1) - by_writing
    ddecay += by_rate * rate[..., 0]
    ddecay[..., -1] += by_writing.sum(-1) + chunks.whole[..., 0, 0] * (dstates * run.states).sum((-2, -1))
    return dquery, dkey, dvalue.mul_(beta), ddecay.flip(-1).cumsum(-1).flip(-1), dbeta


def _normalized_backward(grad: Tensor, normalized: Tensor, factor: Tensor, scale: float) -> Tensor:
    """The gradient of x, for that of `normalized`, which is scale * x * factor."""
    unit = normalized / scale
    along = (grad * unit).sum(-1, keepdim=True)
    return (grad - unit * along).mul_(factor * scale)
