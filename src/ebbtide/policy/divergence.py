"""The divergence between the policy's and a teacher's distribution of each target, over the whole vocabulary, without a
full [tokens, vocabulary] tensor: the logits of one chunk exist at a time, and the backward recomputes them.

With p the policy's and q the teacher's distribution, and m = beta q + (1 - beta) p, the divergence is KL(q || p) for
beta = 0 (forward KL), KL(p || q) for beta = 1 (reverse KL), and beta KL(q || m) + (1 - beta) KL(p || m) between them
(the generalised Jensen-Shannon divergence).

A chunk of logits in fp32 is large (at a vocabulary of 152k, 1.2 GB of 2048 tokens), so both functions of a chunk
overwrite what they are given: of [chunk, vocabulary] in fp32 the forward has three tensors at most, the backward two,
and one more for a softcap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ebbtide.policy.head import Head, add_matmul, chunks


@dataclass(frozen=True)
class TokenDivergences:
    """What the head computes of each target against a teacher."""

    divergences: Tensor  # [P], with gradient
    logprobs: Tensor  # [P]
    entropies: Tensor  # [P]


def token_divergences(
    hidden: Tensor,  # [P, H]: the policy's hidden state before each target
    head: Head,
    targets: Tensor,  # [P]
    teacher_hidden: Tensor,  # [P, H of the teacher]
    teacher_head: Head,
    *,
    beta: float,
    chunk: int,
) -> TokenDivergences:
    """Both heads may have more rows than the vocabulary that they share, which is that of the smaller one."""
    rows = min(head.weight.shape[0], teacher_head.weight.shape[0])
    arguments = hidden, head.weight, head.bias, targets, teacher_hidden, head, teacher_head, rows, beta, chunk
    return TokenDivergences(*_ChunkedDivergence.apply(*arguments))  # type: ignore[no-untyped-call]


class _ChunkedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        teacher_hidden: Tensor,
        head: Head,
        teacher_head: Head,
        rows: int,
        beta: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        like = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        figures = ChunkFigures(*(torch.empty_like(like) for _ in ChunkFigures._fields))
        for part in chunks(hidden.shape[0], chunk):
            x = head.shaped(head.raw(hidden[part], rows))
            y = teacher_head.shaped(teacher_head.raw(teacher_hidden[part], rows))
            for figure, found in zip(figures, chunk_figures(x, y, targets[part], beta), strict=True):
                figure[part] = found
            del x, y  # so that the next chunk's are not made beside them
        ctx.save_for_backward(hidden, weight, bias, teacher_hidden, figures.lse, figures.teacher_lse, figures.centre)
        ctx.options = head, teacher_head, rows, beta, chunk
        ctx.mark_non_differentiable(figures.logprobs, figures.entropies)
        return figures.divergences, figures.logprobs, figures.entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, teacher_hidden, lse, teacher_lse, centre = ctx.saved_tensors
        head, teacher_head, rows, beta, chunk = ctx.options
        head = replace(head, weight=weight, bias=bias)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias and bias is not None else None
        for part in chunks(hidden.shape[0], chunk):
            raw = head.raw(hidden[part], rows)
            x = head.shaped(raw, keep=head.softcap is not None)
            y = teacher_head.shaped(teacher_head.raw(teacher_hidden[part], rows))
            x = chunk_gradient(x, y, lse[part], teacher_lse[part], centre[part], beta)
            del y
            grad = head.chain(x.mul_(grads[0][part][:, None]), raw).to(hidden.dtype)
            del x, raw
            if grad_hidden is not None:
                torch.mm(grad, weight[:rows], out=grad_hidden[part])
            if grad_weight is not None:
                add_matmul(grad_weight[:rows], grad, hidden[part])
            if grad_bias is not None:
                grad_bias[:rows] += grad.sum(0, dtype=torch.float32)
            del grad
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 7,
        )


class ChunkFigures(NamedTuple):
    """What the forward computes of each token of a chunk [c], in fp32."""

    divergences: Tensor
    logprobs: Tensor
    entropies: Tensor
    lse: Tensor
    """The log-sum-exp of the policy's logits: with it, the backward needs no sum over the vocabulary."""
    teacher_lse: Tensor
    centre: Tensor
    """The mean under p of the log-ratio that the gradient has: KL(p || q), or KL(p || m)."""


def chunk_figures(
    x: Tensor,  # [c, V]: the policy's logits in fp32; overwritten
    y: Tensor,  # [c, V]: the teacher's; overwritten
    targets: Tensor,  # [c]
    beta: float,
) -> ChunkFigures:
    """The figures of a chunk, from its logits."""
    lse, teacher_lse = x.logsumexp(-1), y.logsumexp(-1)
    log_p, log_q = x.sub_(lse[:, None]), y.sub_(teacher_lse[:, None])
    logprobs = log_p.gather(-1, targets[:, None])[:, 0]
    if beta == 0:
        p = log_p.exp()
        entropies = torch.special.entr(p, out=p).sum(-1)
        log_ratio = torch.sub(log_q, log_p, out=log_p)
        divergences = log_ratio.mul_(log_q.exp_()).sum(-1)
        return ChunkFigures(divergences, logprobs, entropies, lse, teacher_lse, divergences)
    if beta == 1:
        log_ratio = torch.sub(log_p, log_q, out=log_q)
        p = log_p.exp_()
        divergences = log_ratio.mul_(p).sum(-1)
        entropies = torch.special.entr(p, out=p).sum(-1)
        return ChunkFigures(divergences, logprobs, entropies, lse, teacher_lse, divergences)
    p, q = log_p.exp_(), log_q.exp_()
    entropies = torch.special.entr(p).sum(-1)
    m = _mixture(p, q, beta)
    from_q = _times_own_log(q.div_(m), m)  # KL(q || m): q log(q / m) = m (q / m) log(q / m)
    from_p = _times_own_log(p.div_(m), m)
    divergences = beta * from_q + (1 - beta) * from_p
    return ChunkFigures(divergences, logprobs, entropies, lse, teacher_lse, from_p)


def chunk_gradient(
    x: Tensor,  # [c, V]: the policy's logits in fp32; overwritten
    y: Tensor,  # [c, V]: the teacher's; overwritten
    lse: Tensor,  # [c]
    teacher_lse: Tensor,  # [c]
    centre: Tensor,  # [c]
    beta: float,
) -> Tensor:
    """d divergence / d logits of the policy [c, V]. Of the mixture it is (1 - beta) times that of KL(p || m) with m
    held fixed: the terms by which m depends on p cancel."""
    log_p, log_q = x.sub_(lse[:, None]), y.sub_(teacher_lse[:, None])
    if beta == 0:
        return log_p.exp_().sub_(log_q.exp_())
    if beta == 1:
        log_ratio = torch.sub(log_p, log_q, out=log_q)
        return log_p.exp_().mul_(log_ratio.sub_(centre[:, None]))
    p, q = log_p.exp_(), log_q.exp_()
    ratio = torch.div(p, _mixture(p, q, beta, out=q), out=q)
    log_ratio = ratio.clamp_min_(TINY).log_()
    return p.mul_(log_ratio.sub_(centre[:, None])).mul_(1 - beta)


TINY = torch.finfo(torch.float32).tiny
"""Keeps what has the probability 0 in fp32 from being divided by, or taken the logarithm of: it has no part in sums."""


def _mixture(p: Tensor, q: Tensor, beta: float, out: Tensor | None = None) -> Tensor:
    """m, above 0."""
    mixed: Tensor = torch.lerp(p, q, beta, out=out)
    return mixed.clamp_min_(TINY)


def _times_own_log(ratio: Tensor, m: Tensor) -> Tensor:
    """The sum over the vocabulary of m ratio log(ratio); `ratio` is overwritten."""
    entropies: Tensor = torch.special.entr(ratio, out=ratio)
    return -entropies.mul_(m).sum(-1)
