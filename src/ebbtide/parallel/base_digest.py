"""The digest of frozen weights that are sharded among ranks: each rank reads its shards, and no tensor is gathered."""

from __future__ import annotations

from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from ebbtide.model.lora import Digested, base_digest, bits_of, digested_step, sum_of_bits
from ebbtide.parallel.dtensor import is_sharded, local, local_region
from ebbtide.parallel.group import Group


def digest_of_ranks(model: nn.Module, ranks: Group) -> str:
    """`base_digest` of the whole model, on all ranks. All ranks must call this together."""
    return base_digest(model, partial(_read, ranks) if ranks.size > 1 else None)


def _read(ranks: Group, tensor: Tensor) -> Digested:
    part, region = local(tensor), local_region(tensor)
    places = torch.arange(0, tensor.numel(), digested_step(tensor.numel()))
    inside, here = torch.ones_like(places, dtype=torch.bool), torch.zeros_like(places)
    bounds = zip(torch.unravel_index(places, region.full_size), region.offset, region.size, strict=True)
    for place, offset, size in bounds:
        inside &= (place >= offset) & (place < offset + size)
        here = here * size + place - offset
    found = torch.zeros(1 + len(places), dtype=torch.int64)
    found[0] = sum_of_bits(part)
    found[1:][inside] = bits_of(part.reshape(-1)[here[inside].to(part.device)]).to("cpu", torch.int64)
    ranks.sum_tensor(found)
    found //= ranks.size // _shards(tensor)  # So many ranks have the same shard.
    return int(found[0]), found[1:].to(torch.int16)


def _shards(tensor: Tensor) -> int:
    """The number of different shards of a tensor."""
    if not is_sharded(tensor):
        return 1
    axes = enumerate(tensor.placements)
    return prod(tensor.device_mesh.size(axis) for axis, placed in axes if not placed.is_replicate())
