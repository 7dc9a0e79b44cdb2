"""A tensor of which each rank has a part: the part that is here, and its place in the whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:  # torch's parts for several ranks take seconds to import: a start with one does not wait for them
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Placement

    class Sharded(nn.Module, FSDPModule):
        """What FSDP makes of a module."""


def shared_out(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a tensor of several ranks, each with a part of it or with the whole."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def by_fsdp(module: nn.Module) -> TypeGuard[Sharded]:
    """Whether FSDP has shared its weights out."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


@dataclass(frozen=True)
class Region:
    """The box of a tensor that is on this rank; it may be empty."""

    whole: torch.Size
    offset: tuple[int, ...]
    size: torch.Size
    cut: bool = False
    """Other ranks have other parts, or none."""

    @property
    def first(self) -> int:
        """The place of its first element in the flattened whole."""
        place = 0
        for offset, extent in zip(self.offset, self.whole, strict=True):
            place = place * extent + offset
        return place


def local(tensor: Tensor) -> Tensor:
    """What is here of a tensor, without its history: itself, where no other rank has a part."""
    # Of a DTensor, the tensor inside, which `to_local()` gives where no gradient is recorded: what it takes to say so, a step does hundreds of times.
    return (tensor._local_tensor if shared_out(tensor) else tensor).detach()


def everywhere(tensor: Tensor) -> bool:
    """Whether every rank has the whole of it. The same answer on all of them, whatever the sizes of their parts."""
    return not shared_out(tensor) or all(
        way.is_replicate() or tensor.device_mesh.size(place) == 1 for place, way in enumerate(tensor.placements)
    )


S = TypeVar("S")


@dataclass(frozen=True)
class Laid(Generic[S]):
    """How ranks share out a tensor, and what stands for this rank's part."""

    part: S
    mesh: DeviceMesh
    ways: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def out(tensor: Tensor, part: S) -> S | Laid[S]:
        """`part`, which stands for what is here of a tensor; with how that is shared out, if it is."""
        if not shared_out(tensor):
            return part
        return Laid(part, tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())

    def around(self, part: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(part, self.mesh, self.ways, run_check=False, shape=self.shape, stride=self.stride)


def region(tensor: Tensor) -> Region:
    """Where `local(tensor)` lies in the whole."""
    offset, size, cuts = [0] * tensor.ndim, list(tensor.shape), []
    if shared_out(tensor):
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert coordinate is not None  # every rank of a run is in the mesh
        # FSDP cuts what tensor parallelism left of a dimension; torch marks such a cut with a split factor.
        ways: list[Any] = list(tensor.placements)
        cuts = [(hasattr(way, "split_factor"), way.dim, place) for place, way in enumerate(ways) if not way.is_replicate()]
        for _, dim, place in sorted(cuts):
            step = -(-size[dim] // mesh.size(place))
            start = min(coordinate[place] * step, size[dim])
            offset[dim] += start
            size[dim] = min(step, size[dim] - start)
        if torch.Size(size) != local(tensor).shape:
            raise RuntimeError(
                f"a part of {tuple(tensor.shape)} by {tensor.placements} is {tuple(local(tensor).shape)}, and should be {tuple(size)}"
            )
    return Region(tensor.size(), tuple(offset), torch.Size(size), bool(cuts))


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """A module whose weights FSDP has shared out has all of them here meanwhile. All ranks come here together."""
    if by_fsdp(module):
        module.unshard()
    try:
        yield
    finally:
        if by_fsdp(module):
            module.reshard()
