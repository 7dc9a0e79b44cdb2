"""Matmuls of fused blocks and of the head. A row has the same bits among few rows as among many, on GPUs of the Hopper
generation and without split-K (`without_split_k`): what decode and training share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ebbtide.model.block_functions import Activation, activate
from ebbtide.model.linear_sizes import last_columns
from ebbtide.system.gpu import HOPPER, generation
from ebbtide.system.torch_internals import grouped_mm

if TYPE_CHECKING:
    from ebbtide.model.adapter_kernels import Adapters


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


def adapted_linear(x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Adapters) -> Tensor | None:
    """`linear(x, weight, bias)` with what adapters add to it, where one kernel computes both; None elsewhere."""
    if _has_kernels(x) and not torch.is_grad_enabled():
        from ebbtide.model import adapted_linear_kernels

        if adapted_linear_kernels.takes(x, weight, adapters):
            return adapted_linear_kernels.linear(x, weight, bias, adapters)
    return None


def adapted_gated_linear(x: Tensor, weight: Tensor, kind: Activation, adapters: Adapters) -> Tensor | None:
    """`gated_linear(x, weight, kind)` with what adapters add to both halves, where one kernel computes all of it; None
    elsewhere."""
    if _has_kernels(x) and not torch.is_grad_enabled():
        from ebbtide.model import adapted_linear_kernels

        if adapted_linear_kernels.takes_gated(x, weight, adapters):
            return adapted_linear_kernels.gated_linear(x, weight, kind, adapters)
    return None


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Consecutive rows of x [N, K] with a matrix each of weight [E, M, K]: [N, M]. `ends` [E] int32: the row after each
    group's last."""
    if _has_kernels(x) and not torch.is_grad_enabled():
        from ebbtide.model import grouped_kernels

        if grouped_kernels.takes(x, weight, len(x)):
            return grouped_kernels.grouped_linear(x, weight, ends)
    return grouped_mm(x, weight.transpose(1, 2), ends)


def gated_grouped_linear(
    x: Tensor, weight: Tensor, order: Tensor, ends: Tensor, visited: int, kind: Activation
) -> Tensor:
    """`activate(grouped_linear(rows, weight, ends), kind)` [N, M], of weights [E, 2 M, K] with each gate in the first
    half. The rows are tokens of x [T, K], each of them `visited` times; `order` [N]: the visit that is a row."""
    if _has_kernels(x) and not torch.is_grad_enabled():
        from ebbtide.model import grouped_kernels

        if grouped_kernels.takes(x, weight, len(order)):
            return grouped_kernels.gated_grouped_linear(x, weight, order, ends, visited, kind)
    return activate(grouped_linear(x[order // visited], weight, ends), kind)


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.itemsize == 2 and generation(x.device) == HOPPER


def add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total in fp32 += left @ right, without rounding the result of the matmul to 16 bits."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())
