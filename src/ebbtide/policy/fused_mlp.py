"""The gated MLP of a fused block: both halves as one matmul, and the gate as one kernel."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ebbtide.model.block_functions import Activation, activate, activate_backward
from ebbtide.model.families import Family
from ebbtide.model.joined_weights import JoinedWeights
from ebbtide.model.linear import linear
from ebbtide.policy.fused_block import Grads, Saved, Weights, recompute_or


class FusedGatedMLP:
    """`down(activation(gate(x)) * up(x))`. Saves both halves (`mlp_act`)."""

    def __init__(self, family: Family, activation: Activation) -> None:
        self._activation: Activation = activation
        self.joinable = list(dict.fromkeys(f"{path}.weight" for path in (family.gate, family.up)))
        self._halves, self._down = JoinedWeights(self.joinable), f"{family.down}.weight"
        self.names, self.joined = (*self.joinable, self._down), (self._halves,)

    def forward(self, normed: Tensor, weights: Weights, saved: Saved) -> Tensor:
        halves = self._halves.product(normed, weights)
        saved.put("mlp_act", halves)
        return linear(activate(halves, self._activation), weights[self._down])

    def backward(
        self, grad: Tensor, remake: Callable[[], Tensor], weights: Weights, saved: Saved, grads: Grads | None
    ) -> tuple[Tensor, Callable[[Tensor], None]]:
        matrix = self._halves(weights)
        halves = recompute_or(saved.take("mlp_act"), lambda: self._halves.product(remake(), weights))
        # Each in the place of the one that it follows from.
        product, dhalves = activate_backward(halves, grad @ weights[self._down], self._activation)
        if grads is not None:
            grads[self._down] = grad.t() @ product
        del product, halves

        def finish(normed: Tensor) -> None:
            if grads is not None:
                grads.update(self._halves.split(dhalves.t() @ normed, weights))

        return dhalves @ matrix, finish
