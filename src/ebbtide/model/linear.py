"""Matmuls of fused blocks and of the head. A row has the same bits among few rows as among many, on GPUs of the Hopper
generation and without split-K (`without_split_k`): what decode and training share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ebbtide.model.block_functions import Activation, activate
from ebbtide.model.linear_sizes import last_columns
from ebbtide.system.gpu import HOPPER, generation


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] @ weight.T [K, N] + bias [N]."""
    if not _has_kernels(x):
        return nn.functional.linear(x, weight, bias)
    from ebbtide.model import linear_kernels  # It needs triton, which comes with torch on a GPU.

    if not torch.is_grad_enabled():
        if linear_kernels.takes(x, weight):
            return linear_kernels.linear(x, weight, bias)
        if (last := last_columns(len(weight))) and linear_kernels.can_load(x, weight):
            most = len(weight) - last
            biases = (None, None) if bias is None else bias.split([most, last])
            return torch.cat(
                [linear(x, weight[:most], biases[0]), linear_kernels.linear(x, weight[most:], biases[1])], 1
            )
    if len(x) == 1:  # cuBLAS has kernels for vectors, which add in another order.
        return nn.functional.linear(x.expand(2, -1), weight, bias)[:1]
    return nn.functional.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, kind: Activation) -> Tensor:
    """`activate(linear(x, weight), kind)`, of a weight with the gate in its first half."""
    if _has_kernels(x) and not torch.is_grad_enabled():
        from ebbtide.model import linear_kernels

        if linear_kernels.takes_gated(x, weight):
            return linear_kernels.gated_linear(x, weight, kind)
    return activate(linear(x, weight), kind)


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.itemsize == 2 and generation(x.device) == HOPPER
