"""The adapters (LoRA) in a fused block, of linear layers that have the same input. A forward saves nothing for them:
the backward computes what they have of `rank` channels again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ebbtide.model.block_functions import Activation, activate
from ebbtide.model.joined_weights import JoinedWeights
from ebbtide.model.lora import LoraLinear
from ebbtide.model.row_adapters import Columns, RowLoraLinear
from ebbtide.system.side_stream import begin_beside

if TYPE_CHECKING:
    from ebbtide.model.adapter_kernels import Adapters

AddAdapters = Callable[[Tensor], Tensor]
"""Adds what adapters make of their input to the layers' products, in place, and returns these."""


class _Adapter(NamedTuple):
    """One of them."""

    second: str
    """The name of its B [N, rank]."""
    columns: slice
    """Where its layer's product is among those of all layers, side by side."""
    channels: slice
    """Where its channels are among those of all adapters."""


class FusedAdapters:
    """The adapters of linear layers with the same input; some layers may have none. Their A are one matrix, and all
    have the same scale."""

    def __init__(self, block: nn.Module, paths: Sequence[str]) -> None:
        """`paths`: of the layers, in the order of their products."""
        self._adapters: list[_Adapter] = []
        self._columns: Columns = ()
        firsts, column, channel = [], 0, 0
        for path in paths:
            layer = block.get_submodule(path)
            columns = slice(column, column := column + block.get_parameter(f"{path}.weight").shape[0])
            if isinstance(layer, LoraLinear):
                channels = slice(channel, channel := channel + len(layer.lora_A))
                self._adapters.append(_Adapter(f"{path}.lora_B", columns, channels))
                firsts.append(f"{path}.lora_A")
                self._layer = layer
                self._columns += layer.columns if isinstance(layer, RowLoraLinear) else ()
        self._firsts, self._channels = JoinedWeights(firsts), channel

    @property
    def joinable(self) -> Sequence[str]:
        """The names of matrices that are multiplied with the same input: all A [rank, K]."""
        return self._firsts.names

    @property
    def names(self) -> Sequence[str]:
        return [*self._firsts.names, *(one.second for one in self._adapters)]

    @property
    def are_on(self) -> bool:
        """Whether they add anything."""
        return bool(self._adapters) and self._layer.is_on

    def for_kernels(self, x: Tensor, weights: dict[str, Tensor]) -> Adapters | None:
        """What kernels need to compute them, None where torch computes."""
        if not (self.are_on and x.is_cuda and x.itemsize == 2) or isinstance(self._layer, RowLoraLinear):
            return None
        from ebbtide.model.adapter_kernels import Adapters  # It needs triton, which comes with torch on a GPU.

        seconds = [weights[one.second] for one in self._adapters]
        starts = [one.columns.start for one in self._adapters]
        return Adapters(self._firsts(weights), seconds, starts, self._layer.scale)

    def begin(self, x: Tensor, weights: dict[str, Tensor], adapters: Adapters | None) -> AddAdapters:
        """Begins what the adapters make of x [T, K], in a CUDA graph beside what follows. Returns a function that adds
        it to the layers' products [T, N], in place, and returns these. `adapters`: of `for_kernels`."""
        if not self.are_on:
            return lambda products: products
        if adapters is not None:
            from ebbtide.model import adapter_kernels

            low, join = begin_beside(lambda: adapter_kernels.shrink(x, adapters.first), x.device)

            def add(products: Tensor) -> Tensor:
                join()
                adapter_kernels.expand(products, low, adapters.seconds, adapters.columns, adapters.scale)
                return products

            return add

        def add_in_torch(products: Tensor) -> Tensor:
            low = self._firsts.product(x, weights)
            if isinstance(self._layer, RowLoraLinear):
                low.mul_(self._layer.rows.mask(self._columns))
            for one in self._adapters:
                second = weights[one.second]
                products[:, one.columns].addmm_(low[:, one.channels], second.t(), alpha=self._layer.scale)
            return products

        return add_in_torch

    def begin_gated(
        self, x: Tensor, weights: dict[str, Tensor], adapters: Adapters | None, kind: Activation
    ) -> AddAdapters:
        """As `begin`, of both halves of a gated MLP: the function returns what `activate` makes of the products."""
        if adapters is None or len(adapters.seconds) < 2:
            add = self.begin(x, weights, adapters)
            return lambda products: activate(add(products), kind)
        from ebbtide.model import adapter_kernels

        low, join = begin_beside(lambda: adapter_kernels.shrink(x, adapters.first), x.device)

        def add_and_activate(products: Tensor) -> Tensor:
            join()
            return adapter_kernels.expand_gated(products, low, adapters.seconds, adapters.scale, kind)

        return add_and_activate

    def backward(
        self, dx: Tensor, grad: Tensor, weights: dict[str, Tensor], grads: dict[str, Tensor | None]
    ) -> Callable[[Tensor], None]:
        """Adds to the gradient of x, in place, for that of the products. Returns a function that is called with x, and
        sets the adapters' own gradients."""
        if not self._adapters:
            return lambda x: None
        scale, dlow = self._layer.scale, grad.new_empty((len(grad), self._channels))
        for one in self._adapters:
            part = dlow[:, one.channels]
            torch.addmm(part, grad[:, one.columns], weights[one.second], beta=0, alpha=scale, out=part)
        dx.addmm_(dlow, self._firsts(weights))

        def finish(x: Tensor) -> None:
            grads.update(self._firsts.split(dlow.t() @ x, weights))
            low = self._firsts.product(x, weights)
            for one in self._adapters:
                part = grad[:, one.columns].t(), low[:, one.channels]
                grads[one.second] = torch.addmm(weights[one.second], *part, beta=0, alpha=scale)

        return finish
