"""The experts of a fused block: tokens sorted by expert and multiplied in groups, without the host knowing how many
tokens an expert has."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ebbtide.model.block_functions import Activation, activate, activate_weighted_backward, combine
from ebbtide.model.families import Family
from ebbtide.model.linear import linear
from ebbtide.policy.fused_block import Grads, Weights
from ebbtide.policy.saved_activations import Saved, recompute_or
from ebbtide.system.torch_internals import grouped_mm


class _Routing(NamedTuple):
    """Which experts a token visits: N = T x visited rows, sorted by expert."""

    probabilities: Tensor  # [T, E] float32
    chosen: Tensor  # [T, visited]: the experts of each token
    weights: Tensor  # [T, visited] float32, rounded to the model's dtype
    tokens: Tensor  # [N]: the token of each row
    places: Tensor  # [T, visited]: the row of each visit
    ends: Tensor  # [E] int32: the row after each expert's last


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
        halves = self._project(normed, routing, weights)
        saved.put("moe_act", halves)
        rows = grouped_mm(activate(halves, self._activation), weights[self._down].transpose(1, 2), routing.ends)
        return combine(rows, routing.places, routing.weights)

    def _route(self, logits: Tensor) -> _Routing:
        probabilities = torch.softmax(logits, -1, dtype=torch.float32)
        top, chosen = torch.topk(probabilities, self._visited, -1)
        if self._normalizes:
            top = top / top.sum(-1, keepdim=True)
        order = torch.sort(chosen.flatten(), stable=True).indices  # [N]: the visit of each row
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        counts = torch.zeros(logits.shape[1], dtype=torch.int32, device=logits.device)
        counts.index_add_(0, chosen.flatten(), torch.ones_like(order, dtype=torch.int32))
        return _Routing(
            probabilities,
            chosen,
            top.to(logits.dtype).float(),
            order // self._visited,
            places.view_as(chosen),
            counts.cumsum(0, dtype=torch.int32),
        )

    def _project(self, normed: Tensor, routing: _Routing, weights: Weights) -> Tensor:
        return grouped_mm(normed[routing.tokens], weights[self._halves].transpose(1, 2), routing.ends)

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
        by_row = grad[routing.tokens]
        scale = torch.empty_like(routing.weights.flatten())
        scale[routing.places.flatten()] = routing.weights.flatten()  # [N]: the weight of each row
        # A token's gradient reaches an expert times the expert's weight; without that factor, its product with the
        # expert's activations is the gradient of the weight.
        product, dhalves, dscale = activate_weighted_backward(
            halves, grouped_mm(by_row, down, routing.ends), scale, self._activation
        )
        if wants:
            grads[self._down] = grouped_mm(by_row.t(), product, routing.ends)
        del by_row, product, halves
        dnormed = combine(grouped_mm(dhalves, halves_weight, routing.ends), routing.places, None)
        dlogits = self._route_backward(dscale[routing.places], routing).to(logits.dtype)

        def finish(normed: Tensor) -> None:
            if wants:
                grads[self._halves] = grouped_mm(dhalves.t(), normed[routing.tokens], routing.ends)
                grads[self._router] = dlogits.t() @ normed

        return dnormed.addmm_(dlogits, router), finish

    def _route_backward(self, dweights: Tensor, routing: _Routing) -> Tensor:
        """The gradient of the logits, for the gradient [T, visited] of the experts' weights."""
        probabilities = routing.probabilities
        if self._normalizes:
            top = probabilities.gather(1, routing.chosen)
            total = top.sum(-1, keepdim=True)
            dweights = (dweights - (dweights * top).sum(-1, keepdim=True) / total) / total
        dprobabilities = torch.zeros_like(probabilities).scatter_(1, routing.chosen, dweights)
        return probabilities * (dprobabilities - (dprobabilities * probabilities).sum(-1, keepdim=True))
