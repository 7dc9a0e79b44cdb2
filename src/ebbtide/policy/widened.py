"""Runs a model of 16 bits in float32, for checks that its own rounding would hide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from ebbtide.model.quantized_layers import quantized_of
from ebbtide.parallel.dtensor import is_sharded
from ebbtide.policy.separation import layer_list

NARROW = (torch.bfloat16, torch.float16)


def can_widen(model: PreTrainedModel) -> bool:
    """Whether a model's weights can be widened where they are: they are numbers, and not sharded."""
    return not any(is_sharded(parameter) for parameter in model.parameters()) and not any(
        quantized_of(module) is not None for module in model.modules()
    )


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Inside this context a model of 16 bits computes in float32, with the numbers that its weights have. One layer, or
    one module outside the layers, is in memory in float32 at a time. The weights themselves stay where they are."""
    narrow: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = {}

    def widen(module: nn.Module, *_: object) -> None:
        narrow[module] = [(weight, weight.data) for weight in weights[module] if weight.dtype in NARROW]
        for weight, data in narrow[module]:
            weight.data = data.float()

    def restore(module: nn.Module, *_: object) -> None:
        for weight, data in narrow.pop(module, ()):
            weight.data = data

    layers = layer_list(model)
    inside = set(layers.modules())
    weights = {module: [*module.parameters(recurse=False)] for module in model.modules() if module not in inside}
    weights |= {layer: [*layer.parameters()] for layer in layers}
    with ExitStack() as hooks, torch.backends.cudnn.flags(enabled=False):  # It may round to TF32.
        if model.device.type == "cuda":  # So may other kernels of attention.
            hooks.enter_context(sdpa_kernel(SDPBackend.MATH))
        for module in weights:
            # The weights are widened after hooks that gather them, and restored before those that free them.
            hooks.enter_context(module.register_forward_pre_hook(widen))
            hooks.enter_context(module.register_forward_hook(restore, prepend=True))
        try:
            yield
        finally:
            for module in [*narrow]:
                restore(module)
