"""Activation offload: saved tensors wait on the host between the forward that saves them and the backward that needs
them.

They are stored end to end in one pinned block, in the order in which the forward saves them; the backward fetches them
in reverse, so the block fills and empties like a stack, whatever their shapes. Tensors come in groups, one per block of
the model, and each group moves at once: a handful of driver calls per block, where one move per tensor kept the host
busier than the device. A group is copied out as the next one begins, and its device memory is freed when the one after
that begins: compute then waits for the copies, which are long over if the host link keeps up, and the host never waits.
In the backward, the first tensor that is fetched of a group prefetches the group before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ebbtide.memory.costs import GROUPS_IN_FLIGHT
from ebbtide.memory.mover import Move, Mover
from ebbtide.system.torch_internals import StorageWeakRef, tensor_version
from ebbtide.system.units import ceil_div

ALIGNMENT = 512  # bytes


@dataclass(eq=False)
class _Offloaded:
    """The bytes of one storage: where they are on the host, and on the device while they are there."""

    group: _Group
    host: Tensor
    offset: int
    device: Tensor | None
    tensor: Tensor | None
    """A tensor over the storage until it is copied: its version shows whether it was changed in place."""
    version: int
    views: int = 0
    """The number of saved tensors that still need it."""
    lost: bool = False
    """It was dropped by `reset`, and cannot be fetched."""


@dataclass(eq=False)
class _Group:
    """The storages that one block of the model saves, which move together."""

    number: int
    storages: list[_Offloaded] = field(default_factory=list)
    out: Move | None = None
    """The copy to the host, once it has begun."""
    back: Move | None = None
    """The copy to the device that compute has not waited for yet."""


@dataclass(frozen=True)
class OffloadedTensor:
    """A saved tensor: its storage, and its view of that storage."""

    storage: _Offloaded
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class ActivationOffloader:
    """`enter(group)` is called as each block's forward begins, `offload(tensor)` for what it saves, and `fetch(view)`
    in the backward."""

    def __init__(self, memory: Tensor, mover: Mover) -> None:
        self._memory, self._mover = memory, mover
        self._groups: dict[int, _Group] = {}
        self._stack: list[_Offloaded] = []
        self._known: dict[tuple[StorageWeakRef, int], _Offloaded] = {}
        self._group = _Group(-1)
        self._last_back: Move | None = None
        self._offloaded_bytes = self._refused_bytes = 0

    def drain(self) -> tuple[int, int]:
        """(bytes offloaded, bytes that found no room on the host and stayed on the device) since the last call."""
        counts = self._offloaded_bytes, self._refused_bytes
        self._offloaded_bytes = self._refused_bytes = 0
        return counts

    def reset(self) -> None:
        """Begins a new forward: forgets what an interrupted one left behind, once no copy uses it."""
        for storage in self._stack:
            for move in (storage.group.out, storage.group.back):
                self._mover.host_waits(move)
            storage.lost, storage.device, storage.tensor = True, None, None
            storage.group.storages.clear()
        self._groups, self._stack, self._known, self._group = {}, [], {}, _Group(-1)

    def enter(self, number: int) -> None:
        """Begins the group of this number, and starts to copy out the one before it."""
        if number <= self._group.number:
            self.reset()
        self._copy_out(self._group)
        self._group = self._groups[number] = _Group(number)
        self._known = {}
        self._release(number - GROUPS_IN_FLIGHT)

    def _copy_out(self, group: _Group) -> None:
        """Starts to copy a group to the host."""
        pairs = []
        for storage in group.storages:
            if storage.device is not None and storage.tensor is not None:
                if tensor_version(storage.tensor) != storage.version:
                    raise RuntimeError(
                        "a tensor that is saved for the backward was changed in place: it cannot be offloaded"
                    )
                storage.tensor = None
                pairs.append((storage.device, storage.host))
        if pairs:
            # The bytes that the last micro-batch put here may still be on their way back to the device.
            group.out = self._mover.move_out(pairs, after=self._last_back, kept_by_caller=True)

    def _release(self, number: int) -> None:
        """Frees a group's device memory: what compute does from here on comes after its copies."""
        group = self._groups.get(number)
        if group is None or group.out is None:
            return
        self._mover.compute_waits(group.out)
        for storage in group.storages:
            storage.device = None

    def tracks(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is offloaded already, because of another tensor over it."""
        return bool(self._known) and _identity(tensor) in self._known

    def offload(self, tensor: Tensor) -> OffloadedTensor | None:
        """Offloads a tensor's storage when its group is complete; None where there is no room on the host."""
        known = _identity(tensor)
        storage = self._known.get(known)
        if storage is None:
            storage = self._place(tensor)
            if storage is None:
                return None
            self._known[known] = storage
        storage.views += 1
        return OffloadedTensor(storage, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _place(self, tensor: Tensor) -> _Offloaded | None:
        """Puts a tensor's storage on top of the stack; None where there is no room."""
        source = tensor.untyped_storage()
        size = source.nbytes()
        top = self._stack[-1].offset + self._stack[-1].host.numel() if self._stack else 0
        offset = ceil_div(top, ALIGNMENT) * ALIGNMENT
        if offset + size > self._memory.numel():
            self._refused_bytes += size
            return None
        host = self._memory[offset : offset + size]
        device = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)
        storage = _Offloaded(self._group, host, offset, device, tensor, tensor_version(tensor))
        self._stack.append(storage)
        self._group.storages.append(storage)
        self._offloaded_bytes += size
        return storage

    def fetch(self, view: OffloadedTensor) -> Tensor:
        """Returns the tensor as it was; compute waits for its copy to the device if that is still under way."""
        storage = view.storage
        if storage.lost or not storage.views:
            raise RuntimeError(
                "a saved tensor was fetched twice, or after another forward had begun: each forward must be followed"
                " by exactly one backward"
            )
        group = storage.group
        self._copy_back(group)
        if (before := self._groups.get(group.number - 1)) is not None:
            self._copy_back(before)
        if group.back is not None:
            self._mover.compute_waits(group.back)
            group.back = None
        assert storage.device is not None
        found = torch.empty(0, dtype=view.dtype, device=storage.device.device)
        found.set_(storage.device.untyped_storage(), view.offset, view.size, view.stride)
        storage.views -= 1
        if storage.views == 0:
            self._drop(storage)
        return found

    def _copy_back(self, group: _Group) -> None:
        """Starts to copy a group to the device, unless it is there."""
        away = [storage for storage in reversed(group.storages) if storage.device is None]  # in the backward's order
        for storage in away:
            storage.device = torch.empty_like(storage.host, device=self._mover.device)
        pairs = [(storage.device, storage.host) for storage in away if storage.device is not None]
        if pairs:
            group.back = self._last_back = self._mover.move_in(pairs, after=group.out, kept_by_caller=True)

    def _drop(self, storage: _Offloaded) -> None:
        """Frees a storage that no saved tensor needs any more, and takes such storages off the top of the stack."""
        storage.device = storage.tensor = None
        storage.group.storages.remove(storage)
        while self._stack and self._stack[-1].views == 0:
            self._stack.pop()


def _identity(tensor: Tensor) -> tuple[StorageWeakRef, int]:
    """Identifies a storage and its version. As long as the weak reference exists, no other storage gets the same
    identity."""
    return StorageWeakRef(tensor.untyped_storage()), tensor_version(tensor)
