"""The adapters (LoRA) in a fused block, of matrices that are multiplied with the same input. A forward saves nothing
for them: the backward computes what they have of `rank` channels again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ebbtide.model.linear import linear
from ebbtide.model.lora import LoraLinear


@dataclass(frozen=True)
class _Adapter:
    """One of them."""

    layer: LoraLinear
    first: str
    """The name of its A [rank, K], and next that of its B [N, rank]."""
    second: str
    columns: slice
    """Where its layer's product is among those of all layers, side by side."""


class FusedAdapters:
    """The adapters of linear layers with the same input; some layers may have none."""

    def __init__(self, block: nn.Module, paths: Sequence[str]) -> None:
        """`paths`: of the layers, in the order of their products."""
        self._adapters: list[_Adapter] = []
        start = 0
        for path in paths:
            layer = block.get_submodule(path)
            assert isinstance(layer, nn.Linear)
            columns = slice(start, start := start + layer.out_features)
            if isinstance(layer, LoraLinear):
                self._adapters.append(_Adapter(layer, f"{path}.lora_A", f"{path}.lora_B", columns))
        self.names = [name for one in self._adapters for name in (one.first, one.second)]

    def add(self, products: Tensor, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        """Adds what the adapters make of x [T, K] to the layers' products [T, N], in place, and returns these."""
        for one in self._adapters:
            if one.layer.is_on:
                low = linear(x, weights[one.first])
                products[:, one.columns].addmm_(low, weights[one.second].t(), alpha=one.layer.scale)
        return products

    def backward(
        self, dx: Tensor, grad: Tensor, weights: dict[str, Tensor], grads: dict[str, Tensor | None]
    ) -> Callable[[Tensor], None]:
        """Adds to the gradient of x, in place, for that of the products. Returns a function that is called with x, and
        sets the adapters' own gradients."""
        lows = []
        for one in self._adapters:
            dlow = (grad[:, one.columns] @ weights[one.second]).mul_(one.layer.scale)
            dx.addmm_(dlow, weights[one.first])
            lows.append(dlow)

        def finish(x: Tensor) -> None:
            for one, dlow in zip(self._adapters, lows, strict=True):
                low = linear(x, weights[one.first])
                grads[one.first] = dlow.t() @ x
                grads[one.second] = (grad[:, one.columns].t() @ low).mul_(one.layer.scale)

        return finish
