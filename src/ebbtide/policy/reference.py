"""The reference policy: a frozen copy of the initial weights in buckets, which the residency moves to the device for
the logprob phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ebbtide.memory.buckets import allocate_buckets
from ebbtide.memory.residency import Residency
from ebbtide.parallel.dtensor import is_sharded, local


@torch.no_grad()
def freeze_reference(model: nn.Module, residency: Residency) -> dict[str, Tensor]:
    """Name -> frozen copy of this rank's shard of each parameter that is trained, registered as the holding
    `reference`. The policy's own module computes with them: there is no second model."""
    named = {name: local(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}
    kinds = {parameter.dtype for parameter in named.values()}
    copies: dict[str, Tensor] = {}
    flats: list[Tensor] = []
    for dtype in sorted(kinds, key=str):
        names = [name for name, parameter in named.items() if parameter.dtype == dtype]
        made, views = allocate_buckets([named[name].shape for name in names], dtype, residency.device)
        flats += made
        copies |= {name: view.copy_(named[name]) for name, view in zip(names, views, strict=True)}
    residency.register("reference", flats, frozen=True)
    residency.offload_at_start("reference")
    return copies


@contextmanager
@torch.no_grad()
def use_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside this context the model computes with these weights in place of its own of the same names. Those of a
    sharded model are exchanged with its own, and again at the end: FSDP knows them by their memory."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in weights}
    own = {name: parameter.data for name, parameter in parameters.items() if not is_sharded(parameter)}

    def exchange() -> None:
        for name, parameter in parameters.items():
            if name not in own:
                shard = local(parameter)
                before = shard.clone()
                shard.copy_(weights[name])
                weights[name].copy_(before)

    exchange()
    try:
        for name in own:
            parameters[name].data = weights[name]
        yield
    finally:
        for name, data in own.items():
            parameters[name].data = data
        exchange()
