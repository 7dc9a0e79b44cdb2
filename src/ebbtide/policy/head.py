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
from ebbtide.model.linear import add_matmul, linear
from ebbtide.model.quantize import Quantized, dequantize, linear_in_slices, product_in_slices
from ebbtide.policy import logprob_reference
from ebbtide.policy.head_costs import LOGITS, backward_bytes, forward_bytes


@dataclass(frozen=True)
class Head:
    """The output head of a model: its logits are scale * softcap * tanh((hidden @ weight.T + bias) / softcap)."""

    matrix: Tensor | Quantized  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None

    @property
    def weight(self) -> Tensor:
        """The matrix in numbers. Those of a quantized one are made each time."""
        return self.matrix if isinstance(self.matrix, Tensor) else dequantize(self.matrix, self.matrix.scale.dtype)

    @property
    def vocabulary(self) -> int:
        """The rows of the matrix."""
        return len(self.matrix if isinstance(self.matrix, Tensor) else self.matrix.codes)

    @property
    def itemsize(self) -> int:
        """The bytes of a logit as the matmul writes it."""
        return (self.matrix if isinstance(self.matrix, Tensor) else self.matrix.scale).itemsize

    def raw(self, hidden: Tensor, rows: int) -> Tensor:
        """The product [c, rows] of hidden states [c, H] with the weight, for the first so many tokens of the
        vocabulary."""
        bias = None if self.bias is None else self.bias[:rows]
        if isinstance(self.matrix, Tensor):
            return linear(hidden, self.matrix[:rows], bias)
        return linear_in_slices(hidden, self.matrix.rows(slice(rows)), bias)

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
    weight: Tensor | Quantized,  # [V, H]
    bias: Tensor | None,  # [V]
    targets: Tensor,  # [P]: the tokens predicted
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int = 2048,
) -> tuple[Tensor, Tensor]:
    """fp32 log-prob of each target [P] and entropy of each row [P] under softmax(scale * softcap(hidden @ weight.T +
    bias))."""
    dense, codes = (weight, None) if isinstance(weight, Tensor) else (None, weight)
    arguments = hidden, dense, codes, bias, targets, scale, softcap, chunk
    logprobs, entropies = _ChunkedHead.apply(*arguments)  # type: ignore[no-untyped-call]
    return logprobs, entropies


class _ChunkedHead(torch.autograd.Function):
    """`token_logprobs` with a backward of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        codes: Quantized | None,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        softcap: float | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        reduce, _ = _row_functions(hidden)
        lses = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        logprobs, entropies = torch.empty_like(lses), torch.empty_like(lses)
        vocabulary = len(weight if codes is None else codes.codes)  # type: ignore[arg-type]
        with transient(LOGITS.name, int(forward_bytes(hidden.shape[0], vocabulary, chunk, hidden.itemsize))):
            for part in chunks(hidden.shape[0], chunk):
                logits = _product(hidden[part], weight, codes, bias)  # [c, V]
                lses[part], logprobs[part], entropies[part] = reduce(logits, targets[part], scale, softcap)
        ctx.save_for_backward(hidden, weight, bias, targets, lses, entropies)
        ctx.options = codes, scale, softcap, chunk, vocabulary
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, *_ = ctx.saved_tensors
        *_, chunk, vocabulary = ctx.options
        size = weight.numel() if ctx.needs_input_grad[1] else 0
        needed = backward_bytes(hidden.shape[0], vocabulary, size, chunk, hidden.itemsize)
        with transient(LOGITS.name, int(needed)):
            return _ChunkedHead._gradients(ctx, *grads)

    @staticmethod
    def _gradients(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lses, entropies = ctx.saved_tensors
        codes, scale, softcap, chunk, _ = ctx.options
        need_hidden, need_weight, _, need_bias = ctx.needs_input_grad[:4]
        _, gradient = _row_functions(hidden)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # Accumulated over chunks in fp32 and rounded once: the same precision as one matmul over all tokens.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias and bias is not None else None
        for part in chunks(hidden.shape[0], chunk):
            logits = _product(hidden[part], weight, codes, bias)  # [c, V], overwritten by its gradient
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
            if grad_hidden is not None and codes is None:
                torch.mm(grad, weight, out=grad_hidden[part])
            elif grad_hidden is not None:
                grad_hidden[part] = product_in_slices(grad, codes)
            if grad_weight is not None:
                add_matmul(grad_weight, grad.T, hidden[part])
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 4,
        )


def _product(x: Tensor, weight: Tensor | None, codes: Quantized | None, bias: Tensor | None) -> Tensor:
    if codes is not None:
        return linear_in_slices(x, codes, bias)
    assert weight is not None
    return linear(x, weight, bias)


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
