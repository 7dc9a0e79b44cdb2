"""The output head in chunks: log-probs and entropies of chosen tokens without a full [tokens, vocabulary] tensor.

Full fp32 logits of 32k tokens at a vocabulary of 152k are 19.9 GB. Here only the logits of one chunk exist at a time,
in the weights' type: in the forward each row is reduced to its log-sum-exp, its target's log-prob and its entropy; in
the backward the chunk's logits are recomputed for its gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ebbtide.memory.gauge import transient
from ebbtide.model.linear import linear
from ebbtide.policy import logprob_reference
from ebbtide.policy.head_costs import LOGITS, backward_bytes, forward_bytes


@dataclass(frozen=True)
class Head:
    """The output head of a model: its logits are scale * softcap * tanh((hidden @ weight.T + bias) / softcap)."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None

    def raw(self, hidden: Tensor, rows: int) -> Tensor:
        """The product [c, rows] of hidden states [c, H] with the weight, for the first so many tokens of the
        vocabulary."""
        return linear(hidden, self.weight[:rows], None if self.bias is None else self.bias[:rows])

    def shaped(self, raw: Tensor, *, keep: bool = False) -> Tensor:
        """The logits in fp32 from the product with the weight, which is overwritten unless it is to be kept."""
        x = raw.to(torch.float32, copy=keep)
        if self.softcap is not None:
            x.div_(self.softcap).tanh_().mul_(self.softcap)
        return x.mul_(self.scale) if self.scale != 1.0 else x

    def chain(self, grad: Tensor, raw: Tensor) -> Tensor:
        """The gradient of `raw` from that of the logits; both are overwritten."""
        if self.softcap is not None:
            grad.mul_(raw.float().div_(self.softcap).tanh_().square_().neg_().add_(1))
        return grad.mul_(self.scale) if self.scale != 1.0 else grad


def token_logprobs(
    hidden: Tensor,  # [P, H]: the hidden state before each predicted token
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    targets: Tensor,  # [P]: the tokens predicted
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int = 2048,
) -> tuple[Tensor, Tensor]:
    """fp32 log-prob of each target [P] and entropy of each row [P] under softmax(scale * softcap(hidden @ weight.T +
    bias))."""
    arguments = hidden, weight, bias, targets, scale, softcap, chunk
    logprobs, entropies = _ChunkedHead.apply(*arguments)  # type: ignore[no-untyped-call]
    return logprobs, entropies


class _ChunkedHead(torch.autograd.Function):
    """`token_logprobs` with a backward of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        softcap: float | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        reduce, _ = _row_functions(hidden)
        lses = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        logprobs, entropies = torch.empty_like(lses), torch.empty_like(lses)
        with transient(LOGITS.name, int(forward_bytes(hidden.shape[0], weight.shape[0], chunk, weight.itemsize))):
            for part in chunks(hidden.shape[0], chunk):
                logits = linear(hidden[part], weight, bias)  # [c, V]
                lses[part], logprobs[part], entropies[part] = reduce(logits, targets[part], scale, softcap)
        ctx.save_for_backward(hidden, weight, bias, targets, lses, entropies)
        ctx.options = scale, softcap, chunk
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, *_ = ctx.saved_tensors
        size = weight.numel() if ctx.needs_input_grad[1] else 0
        needed = backward_bytes(hidden.shape[0], weight.shape[0], size, ctx.options[-1], weight.itemsize)
        with transient(LOGITS.name, int(needed)):
            return _ChunkedHead._gradients(ctx, *grads)

    @staticmethod
    def _gradients(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lses, entropies = ctx.saved_tensors
        scale, softcap, chunk = ctx.options
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        _, gradient = _row_functions(hidden)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # Accumulated over chunks in fp32 and rounded once: the same precision as one matmul over all tokens.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias and bias is not None else None
        for part in chunks(hidden.shape[0], chunk):
            logits = linear(hidden[part], weight, bias)  # [c, V], overwritten by its gradient
            grad = gradient(
                logits,
                targets[part],
                lses[part],
                entropies[part],
                grad_logprobs[part],
                grad_entropies[part],
                scale,
                softcap,
            )
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                add_matmul(grad_weight, grad, hidden[part])
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 4,
        )


def chunks(tokens: int, chunk: int) -> list[slice]:
    """The parts of so many rows, of at most `chunk` each."""
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


def _row_functions(hidden: Tensor) -> tuple[Any, Any]:
    """(reduce, gradient) for the rows of a chunk: kernels with one pass each over the logits on a GPU, plain torch
    elsewhere."""
    if hidden.is_cuda:
        from ebbtide.policy import logprob_kernels  # It needs triton, which comes with torch on a GPU.

        return logprob_kernels.reduce, logprob_kernels.gradient
    return logprob_reference.reduce, logprob_reference.gradient


def add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [V, H] in fp32 += left.T @ right, without rounding the result of the matmul to 16 bits."""
    if left.dtype == torch.float32:
        total.addmm_(left.T, right)
    elif left.is_cuda:
        torch.addmm(total, left.T, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float().T, right.float())
