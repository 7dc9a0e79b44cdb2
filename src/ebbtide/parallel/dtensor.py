"""Helpers for sharded tensors (DTensor): this rank's local part, and its place in the whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ebbtide.system.torch_internals import is_strided_shard, local_tensor
from ebbtide.system.units import ceil_div

if TYPE_CHECKING:  # these take seconds to import: a run on one rank does not wait for them
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Placement

    class Sharded(nn.Module, FSDPModule):
        """A module that FSDP has sharded."""


_PLAIN = (Tensor, nn.Parameter)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether the tensor is a DTensor, of which each rank has a shard or a replica."""
    if type(tensor) in _PLAIN:  # A step asks hundreds of times.
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def is_fsdp_module(module: nn.Module) -> TypeGuard[Sharded]:
    """Whether FSDP has sharded the module's weights."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


@dataclass(frozen=True)
class Region:
    """The box of a tensor that is on this rank; it may be empty."""

    full_size: torch.Size
    """The shape of the whole tensor."""
    offset: tuple[int, ...]
    size: torch.Size
    """The shape of the box."""
    is_shard: bool = False
    """The tensor is sharded: other ranks have other boxes, or empty ones."""

    @property
    def flat_offset(self) -> int:
        """The position of the box's first element in the flattened whole."""
        position = 0
        for offset, extent in zip(self.offset, self.full_size, strict=True):
            position = position * extent + offset
        return position


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, detached; the tensor itself where it is not sharded."""
    # `to_local()` gives the same inner tensor where no gradient is recorded, but costs too much: a step does this
    # hundreds of times.
    return (local_tensor(tensor) if is_sharded(tensor) else tensor).detach()


def is_replicated(tensor: Tensor) -> bool:
    """Whether every rank has the whole tensor. All ranks get the same answer, whatever the sizes of their shards."""
    return not is_sharded(tensor) or all(
        placement.is_replicate() or tensor.device_mesh.size(axis) == 1
        for axis, placement in enumerate(tensor.placements)
    )


S = TypeVar("S")


@dataclass(frozen=True)
class ShardSpec(Generic[S]):
    """How a tensor is sharded, and what stands for this rank's part of it."""

    part: S
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def strip(tensor: Tensor, part: S) -> S | ShardSpec[S]:
        """`part`, which stands for this rank's part of a tensor, with how the tensor is sharded if it is."""
        if not is_sharded(tensor):
            return part
        return ShardSpec(part, tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())

    def wrap(self, part: Tensor) -> Tensor:
        """This rank's part as the DTensor that it was."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def local_region(tensor: Tensor) -> Region:
    """The region of `local(tensor)` in the whole."""
    offset, size, cuts = [0] * tensor.ndim, list(tensor.shape), []
    if is_sharded(tensor):
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert coordinate is not None  # every rank of a run is in the mesh
        # FSDP shards what tensor parallelism left of a dimension, so its cut (a strided shard) comes second.
        placements: list[Any] = list(tensor.placements)
        cuts = [
            (is_strided_shard(placement), placement.dim, axis)
            for axis, placement in enumerate(placements)
            if not placement.is_replicate()
        ]
        for _, dim, axis in sorted(cuts):
            step = ceil_div(size[dim], mesh.size(axis))
            start = min(coordinate[axis] * step, size[dim])
            offset[dim] += start
            size[dim] = min(step, size[dim] - start)
        if torch.Size(size) != local(tensor).shape:
            raise RuntimeError(
                f"this rank's part of a tensor {tuple(tensor.shape)} with placements {tensor.placements} is"
                f" {tuple(local(tensor).shape)}, and should be {tuple(size)}"
            )
    return Region(tensor.size(), tuple(offset), torch.Size(size), bool(cuts))


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """All-gathers the weights of a module that FSDP has sharded, for the length of the context. All ranks enter
    together."""
    if is_fsdp_module(module):
        module.unshard()
    try:
        yield
    finally:
        if is_fsdp_module(module):
            module.reshard()
