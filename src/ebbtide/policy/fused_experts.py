"""The experts of a fused block: tokens sorted by expert and multiplied in groups, without the host knowing how many
tokens an expert has."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ebbtide.model.block_functions import (
    Activation,
    activate,
    activate_weighted_backward,
    combine,
    group,
    route,
    route_backward,
)
from ebbtide.model.families import Family
from ebbtide.model.linear import gated_grouped_linear, grouped_linear, linear
from ebbtide.policy.fused_block import Grads, Weights
from ebbtide.policy.saved_activations import Dropped, Saved, recompute_or
from ebbtide.system.torch_internals import grouped_mm


class _Routing(NamedTuple):
    """Which experts a token visits: N = T x visited rows, sorted by expert."""

    chosen: Tensor  # [T, visited] int32: the experts of each token
    weights: Tensor  # [T, visited] float32, rounded to the model's dtype
    order: Tensor  # [N]: the visit of each row
    places: Tensor  # [T, visited]: the row of each visit
    ends: Tensor  # [E] int32: the row after each expert's last

    @property
    def tokens(self) -> Tensor:
        """The token of each row [N]."""
        return self.order // self.chosen.shape[1]


class Experts:
    """A router, and a gated MLP per expert. Saves the router's logits (`moe_router`) and both halves of the visited
    MLPs (`moe_act`)."""

    def __init__(self, family: Family, activation: Activation, visited: int, *, normalizes: bool) -> None:
        self._activation: Activation = activation
        self._visited, self._normalizes = visited, normalizes
        self._router = f"{family.router}.weight"
        self._halves, self._down = f"{family.experts}.gate_up_proj", f"{family.experts}.down_proj"
        self.names = self._router, self._halves, self._down
        self.projections = ()

    def forward(self, normed: Tensor, weights: Weights, saved: Saved) -> Tensor:
        logits = linear(normed, weights[self._router])
        saved.put("moe_router", logits)
        routing = self._route(logits)
        if isinstance(saved, Dropped):
            order, ends = routing.order, routing.ends
            active = gated_grouped_linear(normed, weights[self._halves], order, ends, self._visited, self._activation)
        else:
            halves = self._project(normed, routing, weights)
            saved.put("moe_act", halves)
            active = activate(halves, self._activation)
        return combine(grouped_linear(active, weights[self._down], routing.ends), routing.places, routing.weights)

    def _route(self, logits: Tensor) -> _Routing:
        chosen, weights = route(logits, self._visited, normalizes=self._normalizes)
        return _Routing(chosen, weights, *group(chosen, logits.shape[1]))

    def _project(self, normed: Tensor, routing: _Routing, weights: Weights) -> Tensor:
        return grouped_linear(normed[routing.tokens], weights[self._halves], routing.ends)

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
        router, halves_weight, down = weights[self._router], weights[self._halves], weights[self._down]
        logits = recompute_or(saved.take("moe_router"), lambda: linear(remake(), router))
        routing = self._route(logits)
        halves = recompute_or(saved.take("moe_act"), lambda: self._project(remake(), routing, weights))
        tokens = routing.tokens
        by_row, scale = grad[tokens], routing.weights.flatten()[routing.order]  # [N]: the weight of each row
        # A token's gradient reaches an expert times the expert's weight; without that factor, its product with the
        # expert's activations is the gradient of the weight.
        product, dhalves, dscale = activate_weighted_backward(
            halves, grouped_mm(by_row, down, routing.ends), scale, self._activation
        )
        if wants:
            grads[self._down] = grouped_mm(by_row.t(), product, routing.ends)
        del by_row, product, halves
        dnormed = combine(grouped_mm(dhalves, halves_weight, routing.ends), routing.places, None)
        dlogits = route_backward(logits, routing.chosen, dscale[routing.places], normalizes=self._normalizes)

        def finish(normed: Tensor) -> None:
            if wants:
                grads[self._halves] = grouped_mm(dhalves.t(), normed[tokens], routing.ends)
                grads[self._router] = dlogits.t() @ normed

        return dnormed.addmm_(dlogits, router), finish
