"""The divergence of each row of logits from a teacher's, in plain torch: the reference for divergence_kernels.py, and
the implementation on a CPU. Tensors are written over where they can be, so that few of a chunk's size are alive."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ebbtide.policy.head import Head


class RowFigures(NamedTuple):
    """What the forward computes of each token of a chunk [c], in fp32."""

    divergences: Tensor
    logprobs: Tensor
    entropies: Tensor
    lse: Tensor
    """The log-sum-exp of the policy's logits: with it, the backward needs no sum over the vocabulary."""
    teacher_lse: Tensor
    centre: Tensor
    """The mean under p of the log-ratio that the gradient has: KL(p || q), or KL(p || m)."""


TINY = torch.finfo(torch.float32).tiny
"""Keeps what has the probability 0 in fp32 from being divided by, or taken the logarithm of: it has no part in sums."""


def reduce(
    raw: Tensor,  # [c, V]: the product of the policy's hidden states with its head's weight
    teacher_raw: Tensor,  # [c, V]: the same of the teacher
    targets: Tensor,  # [c]
    beta: float,
    head: Head,
    teacher_head: Head,
) -> RowFigures:
    """The figures of a chunk; what is passed may be overwritten."""
    x, y = head.shaped(raw), teacher_head.shaped(teacher_raw)
    lse, teacher_lse = x.logsumexp(-1), y.logsumexp(-1)
    log_p, log_q = x.sub_(lse[:, None]), y.sub_(teacher_lse[:, None])
    logprobs = log_p.gather(-1, targets[:, None])[:, 0]
    if beta == 0:
        p = log_p.exp()
        entropies = torch.special.entr(p, out=p).sum(-1)
        log_ratio = torch.sub(log_q, log_p, out=log_p)
        divergences = log_ratio.mul_(log_q.exp_()).sum(-1)
        return RowFigures(divergences, logprobs, entropies, lse, teacher_lse, divergences)
    if beta == 1:
        log_ratio = torch.sub(log_p, log_q, out=log_q)
        p = log_p.exp_()
        divergences = log_ratio.mul_(p).sum(-1)
        entropies = torch.special.entr(p, out=p).sum(-1)
        return RowFigures(divergences, logprobs, entropies, lse, teacher_lse, divergences)
    p, q = log_p.exp_(), log_q.exp_()
    entropies = torch.special.entr(p).sum(-1)
    m = _mixture(p, q, beta)
    from_q = _times_own_log(q.div_(m), m)  # KL(q || m): q log(q / m) = m (q / m) log(q / m)
    from_p = _times_own_log(p.div_(m), m)
    return RowFigures(beta * from_q + (1 - beta) * from_p, logprobs, entropies, lse, teacher_lse, from_p)


def gradient(
    raw: Tensor,  # [c, V]
    teacher_raw: Tensor,  # [c, V]
    lse: Tensor,  # [c]
    teacher_lse: Tensor,  # [c]
    centre: Tensor,  # [c]
    grad_divergences: Tensor,  # [c]
    beta: float,
    head: Head,
    teacher_head: Head,
) -> Tensor:
    """d loss / d raw [c, V], in its type. Of the mixture it is (1 - beta) times that of KL(p || m) with m held fixed:
    the terms by which m depends on p cancel."""
    x = head.shaped(raw, keep=head.softcap is not None)
    log_p = x.sub_(lse[:, None])
    log_q = teacher_head.shaped(teacher_raw).sub_(teacher_lse[:, None])
    if beta == 0:
        grad = log_p.exp_().sub_(log_q.exp_())
    elif beta == 1:
        log_ratio = torch.sub(log_p, log_q, out=log_q)
        grad = log_p.exp_().mul_(log_ratio.sub_(centre[:, None]))
    else:
        p, q = log_p.exp_(), log_q.exp_()
        ratio = torch.div(p, _mixture(p, q, beta, out=q), out=q)
        log_ratio = ratio.clamp_min_(TINY).log_()
        grad = p.mul_(log_ratio.sub_(centre[:, None])).mul_(1 - beta)
    return head.chain(grad.mul_(grad_divergences[:, None]), raw).to(raw.dtype)


def _mixture(p: Tensor, q: Tensor, beta: float, out: Tensor | None = None) -> Tensor:
    """m, above 0."""
    return torch.lerp(p, q, beta, out=out).clamp_min_(TINY)


def _times_own_log(ratio: Tensor, m: Tensor) -> Tensor:
    """The sum over the vocabulary of m ratio log(ratio); `ratio` is overwritten."""
    total: Tensor = torch.special.entr(ratio, out=ratio).mul_(m).sum(-1)
    return -total
