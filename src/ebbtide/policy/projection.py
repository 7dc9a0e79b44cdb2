"""Linear layers of a fused block that have the same input, as one: their matrices, which may be quantized, biases and
adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ebbtide.model.block_functions import Activation
from ebbtide.model.joined_weights import JoinedWeights
from ebbtide.model.linear import adapted_gated_linear, adapted_linear, gated_linear
from ebbtide.model.quantize import Quantized, dequantize_all, quantized_linear
from ebbtide.model.quantized_layers import SCALE, quantized_of
from ebbtide.policy.fused_adapters import FusedAdapters

if TYPE_CHECKING:
    from ebbtide.model.adapter_kernels import Adapters


class _Codes(NamedTuple):
    """Layers whose matrices are quantized to the same kind of codes, and follow each other in memory."""

    weight: JoinedWeights
    scale: JoinedWeights

    def __call__(self, weights: dict[str, Tensor]) -> Quantized:
        return Quantized(self.weight(weights), self.scale(weights))


class Projection:
    """The products of one input with some matrices, side by side."""

    def __init__(self, block: nn.Module, paths: Sequence[str]) -> None:
        """`paths`: of the layers in the block, in the order of their products."""
        present = {name for name, _ in block.named_parameters()}

        def of_layers(kind: str, paths: Sequence[str] = paths) -> JoinedWeights:
            return JoinedWeights([name for path in paths if (name := f"{path}.{kind}") in present])

        def kind_of(path: str) -> torch.dtype:
            return block.get_parameter(f"{path}.weight").dtype

        self._weight, self._bias = of_layers("weight"), of_layers("bias")
        self._codes: list[_Codes] = []
        if all(quantized_of(block.get_submodule(path)) is not None for path in paths):
            same = [list(some) for _, some in groupby(paths, kind_of)]
            self._codes = [_Codes(of_layers("weight", some), of_layers(SCALE, some)) for some in same]
        matrices = [one for codes in self._codes for one in codes] or [self._weight]
        self._own = *matrices, self._bias
        self._adapters = FusedAdapters(block, paths)

    @property
    def names(self) -> Sequence[str]:
        """Paths of its weights in the block, without those of adapters."""
        return [name for one in self._own for name in one.names]

    @property
    def adapter_names(self) -> Sequence[str]:
        return self._adapters.names

    @property
    def joinable(self) -> Sequence[Sequence[str]]:
        """Names of weights that are to follow each other in memory."""
        return [*(one.names for one in self._own), self._adapters.joinable]

    def keep_apart(self) -> None:
        """Multiplies matrices one by one with few rows, even where they follow each other in memory."""
        self._weight.apart = True

    def __call__(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        """The products of x [T, K]: [T, N]."""
        adapters = self._adapters.for_kernels(x, weights)
        if adapters is not None and self._is_matrix(weights):
            bias = self._bias(weights) if self._bias.names else None
            if (found := adapted_linear(x, self._weight(weights), bias, adapters)) is not None:
                return found
        add_adapters = self._adapters.begin(x, weights, adapters)
        return add_adapters(self._product(x, weights, adapters))

    def gated(self, x: Tensor, weights: dict[str, Tensor], kind: Activation) -> Tensor:
        """What `activate` makes of the products of x with both halves of a gated MLP: [T, N]. Nothing is saved."""
        adapters = self._adapters.for_kernels(x, weights)
        if self._is_matrix(weights) and not self._bias.names:
            if not self._adapters.are_on:
                return gated_linear(x, self._weight(weights), kind)
            if adapters is not None:
                found = adapted_gated_linear(x, self._weight(weights), kind, adapters)
                if found is not None:
                    return found
        activate_with_adapters = self._adapters.begin_gated(x, weights, adapters, kind)
        return activate_with_adapters(self._product(x, weights, adapters))

    def _is_matrix(self, weights: dict[str, Tensor]) -> bool:
        """Whether all matrices are one in memory, of numbers."""
        return not self._codes and self._weight.is_whole(weights)

    def _product(self, x: Tensor, weights: dict[str, Tensor], adapters: Adapters | None) -> Tensor:
        """`adapters`: those whose kernel adds to it next, and waits for a branch of a CUDA graph anyway."""
        if not self._codes:
            return self._weight.product(x, weights, self._bias)
        bias = self._bias(weights) if self._bias.names else None
        return quantized_linear(x, self._quantized(weights), bias, may_branch=adapters is not None)

    def _quantized(self, weights: dict[str, Tensor]) -> list[Quantized]:
        return [codes(weights) for codes in self._codes]

    def _matrix(self, weights: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """All matrices as one, in numbers [N, K]."""
        return dequantize_all(self._quantized(weights), dtype) if self._codes else self._weight(weights)

    def backward(
        self, grad: Tensor, weights: dict[str, Tensor], grads: dict[str, Tensor | None], *, wants: bool
    ) -> tuple[Tensor, Callable[[Tensor], None]]:
        """(the gradient of x, a function that is called with x and sets the gradients of the weights, of others than
        adapters only if it `wants` them)."""
        dx = grad @ self._matrix(weights, grad.dtype)
        finish_adapters = self._adapters.backward(dx, grad, weights, grads)
        if wants and self._bias.names:
            grads.update(self._bias.split(grad.sum(0), weights))

        def finish(x: Tensor) -> None:
            finish_adapters(x)
            if wants:
                grads.update(self._weight.split(grad.t() @ x, weights))

        return dx, finish
