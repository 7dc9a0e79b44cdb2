"""Matmuls of fused blocks and of the head. A row has the same bits among few rows as among many, on GPUs of the Hopper
generation and without split-K (`without_split_k`): what decode and training share."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from ebbtide.model.linear_sizes import last_columns

HOPPER = 9  # The compute capability of its GPUs.


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] @ weight.T [K, N] + bias [N]."""
    if not (x.is_cuda and x.itemsize == 2 and _is_hopper(x.device)):
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


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == HOPPER
