"""The norm after the last block as one autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ebbtide.model.block_functions import Norm, add_norm, norm_backward


class FusedNorm:
    """The norm after the last block: saves its input alone."""

    def __init__(self, module: nn.Module, norm: Norm) -> None:
        self.module, self._norm = module, norm

    def __call__(self, hidden: Tensor) -> Tensor:
        found: Tensor = _Norm.apply(hidden, self.module.weight, self._norm)  # type: ignore[no-untyped-call]
        return found


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, norm: Norm) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.norm = norm
        return add_norm(hidden.flatten(0, -2), None, weight, norm)[1].view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        flat = hidden.flatten(0, -2)
        dx, dweight, _ = norm_backward(flat, weight, ctx.norm, grads[0].contiguous().view_as(flat), None)
        return dx.view_as(hidden), dweight if ctx.needs_input_grad[1] else None, None
