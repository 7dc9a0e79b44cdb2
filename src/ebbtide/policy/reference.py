"""The reference policy: a frozen copy of the starting weights, in buckets, that the residency brings to the device for the logprob phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ebbtide.memory.buckets import buckets
from ebbtide.memory.residency import Residency
from ebbtide.memory.shards import local


@torch.no_grad()
def freeze_reference(model: nn.Module, residency: Residency) -> dict[str, Tensor]:
    """Name -> frozen copy of what is here of each parameter, held as `reference`. The same module computes with them: there is no second model."""
    named = {name: local(parameter) for name, parameter in model.named_parameters()}
    kinds = {parameter.dtype for parameter in named.values()}
    copies: dict[str, Tensor] = {}
    flats: list[Tensor] = []
    for dtype in sorted(kinds, key=str):
        names = [name for name, parameter in named.items() if parameter.dtype == dtype]
        made, views = buckets([named[name].shape for name in names], dtype, residency.device)
        flats += made
        copies |= {name: view.copy_(named[name]) for name, view in zip(names, views, strict=True)}
    residency.hold("reference", flats, frozen=True)
    return copies


@contextmanager
@torch.no_grad()
def exchanged(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """A model whose parameters are shared out among ranks computes with other weights: contents change places, and change back at the end."""

    def exchange() -> None:
        for name, parameter in model.named_parameters():
            mine = local(parameter)
            kept = mine.clone()
            mine.copy_(weights[name])
            weights[name].copy_(kept)

    exchange()
    try:
        yield
    finally:
        exchange()
