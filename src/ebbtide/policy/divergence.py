"""The divergence between the policy's and a teacher's distribution of each target, over the whole vocabulary, without a
full [tokens, vocabulary] tensor: the logits of one chunk exist at a time, and the backward recomputes them.

With p the policy's and q the teacher's distribution, and m = beta q + (1 - beta) p, the divergence is KL(q || p) for
beta = 0 (forward KL), KL(p || q) for beta = 1 (reverse KL), and beta KL(q || m) + (1 - beta) KL(p || m) between them
(the generalised Jensen-Shannon divergence).

On a GPU two kernels read the logits as the matmuls left them. Elsewhere plain torch has at most three fp32 tensors of
[chunk, vocabulary] in the forward and two in the backward, and one more for a softcap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ebbtide.memory.gauge import transient
from ebbtide.model.linear import add_matmul
from ebbtide.model.quantize import product_in_slices
from ebbtide.policy import divergence_reference
from ebbtide.policy.divergence_costs import backward_bytes, forward_bytes
from ebbtide.policy.divergence_reference import RowFigures
from ebbtide.policy.head import Head, chunks
from ebbtide.policy.head_costs import LOGITS


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
    rows = min(head.vocabulary, teacher_head.vocabulary)
    weight = head.matrix if isinstance(head.matrix, Tensor) else None
    arguments = hidden, weight, head.bias, targets, teacher_hidden, head, teacher_head, rows, beta, chunk
    return TokenDivergences(*_ChunkedDivergence.apply(*arguments))  # type: ignore[no-untyped-call]


class _ChunkedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        targets: Tensor,
        teacher_hidden: Tensor,
        head: Head,
        teacher_head: Head,
        rows: int,
        beta: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        reduce, _ = _row_functions(hidden)
        like = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        figures = RowFigures(*(torch.empty_like(like) for _ in RowFigures._fields))
        with transient(LOGITS.name, int(forward_bytes(hidden.shape[0], rows, chunk, _itemsizes(head, teacher_head)))):
            for part in chunks(hidden.shape[0], chunk):
                raw, teacher_raw = head.raw(hidden[part], rows), teacher_head.raw(teacher_hidden[part], rows)
                found = reduce(raw, teacher_raw, targets[part], beta, head, teacher_head)
                for figure, value in zip(figures, found, strict=True):
                    figure[part] = value
                del raw, teacher_raw  # so that the next chunk's are not made beside them
        ctx.save_for_backward(hidden, weight, bias, teacher_hidden, figures.lse, figures.teacher_lse, figures.centre)
        ctx.options = head, teacher_head, rows, beta, chunk
        ctx.mark_non_differentiable(figures.logprobs, figures.entropies)
        return figures.divergences, figures.logprobs, figures.entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, *_ = ctx.saved_tensors
        head, teacher_head, rows, _, chunk = ctx.options
        size = weight.numel() if ctx.needs_input_grad[1] else 0
        itemsizes = _itemsizes(head, teacher_head)
        with transient(LOGITS.name, int(backward_bytes(hidden.shape[0], rows, size, chunk, itemsizes, head.itemsize))):
            return _ChunkedDivergence._gradients(ctx, *grads)

    @staticmethod
    def _gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, teacher_hidden, lse, teacher_lse, centre = ctx.saved_tensors
        head, teacher_head, rows, beta, chunk = ctx.options
        if weight is not None:
            head = replace(head, matrix=weight, bias=bias)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        _, gradient = _row_functions(hidden)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias and bias is not None else None
        for part in chunks(hidden.shape[0], chunk):
            raw, teacher_raw = head.raw(hidden[part], rows), teacher_head.raw(teacher_hidden[part], rows)
            figures = lse[part], teacher_lse[part], centre[part], grads[0][part]
            grad = gradient(raw, teacher_raw, *figures, beta, head, teacher_head)
            del raw, teacher_raw
            if grad_hidden is not None and weight is not None:
                torch.mm(grad, weight[:rows], out=grad_hidden[part])
            elif grad_hidden is not None:
                grad_hidden[part] = product_in_slices(grad, head.matrix.rows(slice(rows)))
            if grad_weight is not None:
                add_matmul(grad_weight[:rows], grad.T, hidden[part])
            if grad_bias is not None:
                grad_bias[:rows] += grad.sum(0, dtype=torch.float32)
            del grad
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 7,
        )


def _itemsizes(*heads: Head) -> int:
    return sum(head.itemsize for head in heads)


def _row_functions(hidden: Tensor) -> tuple[Any, Any]:
    """(reduce, gradient) for the rows of a chunk: kernels on a GPU, plain torch elsewhere."""
    if hidden.is_cuda:
        from ebbtide.policy import divergence_kernels  # It needs triton, which comes with torch on a GPU.

        return divergence_kernels.reduce, divergence_kernels.gradient
    return divergence_reference.reduce, divergence_reference.gradient
