"""The gated MLP of a fused block: both halves as one matmul, and the gate as one kernel."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ebbtide.model.block_functions import Activation, activate, activate_backward
from ebbtide.model.families import Family
from ebbtide.policy.fused_block import Grads, Weights
from ebbtide.policy.projection import Projection
from ebbtide.policy.saved_activations import Dropped, Saved, recompute_or


class FusedGatedMLP:
    """`down(activation(gate(x)) * up(x))`. Saves both halves (`mlp_act`)."""

    def __init__(self, block: nn.Module, family: Family, activation: Activation) -> None:
        self._activation: Activation = activation
        self._halves = Projection(block, list(dict.fromkeys((family.gate, family.up))))
        self._down = Projection(block, [family.down])
        self.projections = self._halves, self._down
        self.names = [name for one in self.projections for name in one.names]

    def forward(self, normed: Tensor, weights: Weights, saved: Saved) -> Tensor:
        if isinstance(saved, Dropped):
            return self._down(self._halves.gated(normed, weights, self._activation), weights)
        halves = self._halves(normed, weights)
        saved.put("mlp_act", halves)
        return self._down(activate(halves, self._activation), weights)

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
        halves = recompute_or(saved.take("mlp_act"), lambda: self._halves(remake(), weights))
        dproduct, finish_down = self._down.backward(grad, weights, grads, wants=wants)
        # Each in the place of the one that it follows from.
        product, dhalves = activate_backward(halves, dproduct, self._activation)
        finish_down(product)
        del product, halves, dproduct, finish_down
        return self._halves.backward(dhalves, weights, grads, wants=wants)
