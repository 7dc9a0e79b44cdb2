"""The reference policy: a frozen copy of the starting weights, in buckets, that the residency brings to the device for the logprob phase."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ebbtide.memory.buckets import buckets
from ebbtide.memory.residency import Residency


@torch.no_grad()
def freeze_reference(model: nn.Module, residency: Residency) -> dict[str, Tensor]:
    """Name -> frozen copy of each parameter, held as `reference`. The same module computes with them: there is no second model."""
    named = dict(model.named_parameters())
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
