"""The convolution of layers with states over many tokens, in place of transformers' own on a GPU: that one copies its
input and its gradients to another layout, and keeps what its activation gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ebbtide.system.transformers_internals import CONVOLUTION, replace_state_function, state_function

SILU = ("silu", "swish")  # transformers' names of it


class Convolution:
    """The kernel for 16 bits on a GPU, or in a plan of one; transformers' function elsewhere."""

    def __init__(self, own: Callable[..., Tensor]) -> None:
        self._own = self.__wrapped__ = own

    def __call__(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **named: Any,
    ) -> Tensor:
        on_gpu = hidden_states.is_cuda or hidden_states.is_meta  # A plan's trace is of a GPU.
        has_bits = hidden_states.dtype == weight.dtype and weight.itemsize == 2
        if (
            not on_gpu
            or not has_bits
            or activation not in (None, *SILU)
            or any(one is not None for one in named.values())
        ):
            return self._own(hidden_states, weight, bias, activation=activation, **named)
        inputs = hidden_states, weight, bias, activation is not None
        found: Tensor = _Convolution.apply(*inputs)  # type: ignore[no-untyped-call]
        return found


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.silu = silu
        if x.is_meta:  # a plan's trace, of what the kernel will make
            return torch.empty_like(x)
        from ebbtide.model import convolution_kernels

        return convolution_kernels.convolve(x, weight, bias, silu=silu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        if x.is_meta:
            # Before the others is made the gradient of what the activation gets.
            _, *found = (None if one is None else torch.empty_like(one) for one in (x, x, weight, bias))
            return *found, None
        from ebbtide.model import convolution_kernels

        return *convolution_kernels.convolve_backward(x, weight, bias, grads[0], silu=ctx.silu), None


def choose_convolution(module: nn.Module) -> None:
    """Replaces the convolution of a layer, and of all others of its class, if it has one."""
    own = state_function(module, CONVOLUTION)
    if own is not None and not isinstance(own, Convolution):
        replace_state_function(module, CONVOLUTION, Convolution(own))
