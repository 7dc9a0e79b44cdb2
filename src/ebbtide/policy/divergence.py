"""The divergence between the policy's and a teacher's distribution of each target, over the whole vocabulary, without a
full [tokens, vocabulary] tensor: the logits of one chunk exist at a time, and the backward recomputes them.

With p the policy's and q the teacher's distribution, and m = beta q + (1 - beta) p, the divergence is KL(q || p) for
beta = 0 (forward KL), KL(p || q) for beta = 1 (reverse KL), and beta KL(q || m) + (1 - beta) KL(p || m) between them
(the generalised Jensen-Shannon divergence).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

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
        divergences = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        logprobs, entropies = torch.empty_like(divergences), torch.empty_like(divergences)
        for part in chunks(hidden.shape[0], chunk):
            p = _log_softmax(head.logits(hidden[part], rows))
            q = _log_softmax(teacher_head.logits(teacher_hidden[part], rows))
            logprobs[part] = p.gather(-1, targets[part][:, None])[:, 0]
            divergences[part] = _divergence(p, q, beta)
            entropies[part] = -(p.exp() * p).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, teacher_hidden)
        ctx.options = head, teacher_head, rows, beta, chunk
        ctx.mark_non_differentiable(logprobs, entropies)
        return divergences, logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, teacher_hidden = ctx.saved_tensors
        head, teacher_head, rows, beta, chunk = ctx.options
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias and bias is not None else None
        for part in chunks(hidden.shape[0], chunk):
            raw = linear(hidden[part], weight[:rows], None if bias is None else bias[:rows])
            p = _log_softmax(head.shaped(raw))
            q = _log_softmax(teacher_head.logits(teacher_hidden[part], rows))
            grad = _gradient(p, q, beta).mul_(grads[0][part][:, None])
            grad = head.chain(grad, raw).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight[:rows], out=grad_hidden[part])
            if grad_weight is not None:
                add_matmul(grad_weight[:rows], grad, hidden[part])
            if grad_bias is not None:
                grad_bias[:rows] += grad.sum(0, dtype=torch.float32)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 7,
        )


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), -1)


def _mixture(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """log m, from the log-probs of both."""
    return torch.logaddexp(q + math.log(beta), p + math.log1p(-beta))


def _divergence(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """[c, V] log-probs of the policy and of the teacher -> [c]."""
    if beta == 0:
        return (q.exp() * (q - p)).sum(-1)
    if beta == 1:
        return (p.exp() * (p - q)).sum(-1)
    m = _mixture(p, q, beta)
    return beta * (q.exp() * (q - m)).sum(-1) + (1 - beta) * (p.exp() * (p - m)).sum(-1)


def _gradient(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """d divergence / d logits of the policy [c, V]. Of the mixture it is (1 - beta) times that of KL(p || m) with m
    held fixed: the terms by which m depends on p cancel."""
    if beta == 0:
        return p.exp() - q.exp()
    ratio = p - (q if beta == 1 else _mixture(p, q, beta))
    chances = p.exp()
    grad = chances * (ratio - (chances * ratio).sum(-1, keepdim=True))
    return grad if beta == 1 else grad * (1 - beta)
