"""The gated MLP of a fused block: both halves as one matmul, and the gate as one kernel."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ebbtide.model.block_functions import Activation, activate, activate_backward
from ebbtide.model.families import Family
from ebbtide.model.joined_weights import JoinedWeights
from ebbtide.model.linear import linear
from ebbtide.policy.fused_adapters import FusedAdapters
from ebbtide.policy.fused_block import Grads, Weights
from ebbtide.policy.saved_activations import Saved, recompute_or


class FusedGatedMLP:
    """`down(activation(gate(x)) * up(x))`. Saves both halves (`mlp_act`)."""

    def __init__(self, block: nn.Module, family: Family, activation: Activation) -> None:
        self._activation: Activation = activation
        self.joinable = list(dict.fromkeys(f"{path}.weight" for path in (family.gate, family.up)))
        self._halves, self._down = JoinedWeights(self.joinable), f"{family.down}.weight"
        halves = list(dict.fromkeys((family.gate, family.up)))
        self._half_adapters, self._down_adapters = FusedAdapters(block, halves), FusedAdapters(block, [family.down])
        self.adapters = self._half_adapters, self._down_adapters
        self.names, self.joined = (*self.joinable, self._down), (self._halves,)

    def forward(self, normed: Tensor, weights: Weights, saved: Saved) -> Tensor:
        halves = self._project(normed, weights)
        saved.put("mlp_act", halves)
        product = activate(halves, self._activation)
        return self._down_adapters.add(linear(product, weights[self._down]), product, weights)

    def _project(self, normed: Tensor, weights: Weights) -> Tensor:
        return self._half_adapters.add(self._halves.product(normed, weights), normed, weights)

    def backward(
        self,
        grad: Tensor,
        remake: Callable[[], Tensor],
        weights: Weights,
        saved: Saved,
        grads: Grads,
        *,
        wants: bool,
    ) -> tuple[Tensor, Callable[[Tensor], None]]:
        matrix = self._halves(weights)
        halves = recompute_or(saved.take("mlp_act"), lambda: self._project(remake(), weights))
        dproduct = grad @ weights[self._down]
        finish_down = self._down_adapters.backward(dproduct, grad, weights, grads)
        # Each in the place of the one that it follows from.
        product, dhalves = activate_backward(halves, dproduct, self._activation)
        if wants:
            grads[self._down] = grad.t() @ product
        finish_down(product)
        del product, halves, dproduct
        dnormed = dhalves @ matrix
        finish_halves = self._half_adapters.backward(dnormed, dhalves, weights, grads)

        def finish(normed: Tensor) -> None:
            finish_halves(normed)
            if wants:
                grads.update(self._halves.split(dhalves.t() @ normed, weights))

        return dnormed, finish
