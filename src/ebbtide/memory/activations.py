"""Tensors that wait on the host between the forward that made them and the backward that needs them.

They lie end to end in one pinned block, in the order in which they come; the backward takes them in reverse, so it fills and empties like a stack,
whatever their shapes. Tensors come in groups, one per block of the model, and each group moves at once: a handful of calls to the driver for a block
where one move a tensor kept the host busier than the device. A group leaves as the next one begins, and its device memory is given up when the one
after that begins: compute then waits for its copies, which are long over if the link keeps up, and the host never does. In the backward, the first tensor
asked of a group brings the group before it back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.memory.mover import Move, Mover

ALIGNMENT = 512  # bytes
WINDOW = 2  # groups whose device memory is still there: the one that is being made, and the one that is leaving


@dataclass(eq=False)
class _Parked:
    """The bytes of one storage: a place on the host, and on the device while they are (still, or again) there."""

    group: _Group
    host: Tensor
    offset: int
    device: Tensor | None
    tensor: Tensor | None
    """While it waits to be copied: a tensor over it, which knows of changes."""
    version: int
    views: int = 0
    """Saved tensors that still need it."""
    lost: bool = False


@dataclass(eq=False)
class _Group:
    number: int
    parked: list[_Parked] = field(default_factory=list)
    gone: Move | None = None
    """The copy to the host, once it was begun."""
    back: Move | None = None
    """The copy to the device that compute has not waited for yet."""


@dataclass(frozen=True)
class View:
    """A saved tensor: where it lies in its storage."""

    parked: _Parked
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Parking:
    """`enter(group)` as each block's forward begins; `park(tensor)` what it saves; `fetch(view)` in the backward."""

    def __init__(self, memory: Tensor, mover: Mover) -> None:
        self._memory, self._mover = memory, mover
        self._groups: dict[int, _Group] = {}
        self._stack: list[_Parked] = []
        self._known: dict[tuple[StorageWeakRef, int], _Parked] = {}
        self._group = _Group(-1)
        self._last_back: Move | None = None
        self._parked_bytes = self._refused_bytes = 0

    def take(self) -> tuple[int, int]:
        """(bytes parked, bytes that found no room and stayed on the device) since the last call."""
        taken = self._parked_bytes, self._refused_bytes
        self._parked_bytes = self._refused_bytes = 0
        return taken

    def reset(self) -> None:
        """A new forward: whatever an interrupted one left behind is forgotten, once no copy uses it."""
        for parked in self._stack:
            for move in (parked.group.gone, parked.group.back):
                self._mover.host_waits(move)
            parked.lost, parked.device, parked.tensor = True, None, None
            parked.group.parked.clear()
        self._groups, self._stack, self._known, self._group = {}, [], {}, _Group(-1)

    def enter(self, number: int) -> None:
        if number <= self._group.number:
            self.reset()
        self._leave(self._group)
        self._group = self._groups[number] = _Group(number)
        self._known = {}
        self._release(number - WINDOW)

    def _leave(self, group: _Group) -> None:
        """Starts to copy a group to the host."""
        pairs = []
        for parked in group.parked:
            if parked.device is not None and parked.tensor is not None:
                if parked.tensor._version != parked.version:
                    raise RuntimeError("a tensor that is saved for the backward was changed in place: it cannot be offloaded")
                parked.tensor = None
                pairs.append((parked.device, parked.host))
        if pairs:
            # What lay here in the last micro-batch may still be on its way back.
            group.gone = self._mover.move_out(pairs, after=self._last_back, held=True)

    def _release(self, number: int) -> None:
        """Gives up a group's device memory: what compute does from here on comes after its copies."""
        group = self._groups.get(number)
        if group is None or group.gone is None:
            return
        self._mover.compute_waits(group.gone)
        for parked in group.parked:
            parked.device = None

    def knows(self, tensor: Tensor) -> bool:
        """Its storage will go to the host already, for another tensor's sake."""
        return bool(self._known) and _identity(tensor) in self._known

    def park(self, tensor: Tensor) -> View | None:
        """Has a tensor's storage copied to the host when its group is complete; None where there is no room."""
        known = _identity(tensor)
        parked = self._known.get(known)
        if parked is None:
            parked = self._placed(tensor)
            if parked is None:
                return None
            self._known[known] = parked
        parked.views += 1
        return View(parked, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _placed(self, tensor: Tensor) -> _Parked | None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        top = self._stack[-1].offset + self._stack[-1].host.numel() if self._stack else 0
        offset = -(-top // ALIGNMENT) * ALIGNMENT
        if offset + size > self._memory.numel():
            self._refused_bytes += size
            return None
        host = self._memory[offset : offset + size]
        device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        parked = _Parked(self._group, host, offset, device, tensor, tensor._version)
        self._stack.append(parked)
        self._group.parked.append(parked)
        self._parked_bytes += size
        return parked

    def fetch(self, view: View) -> Tensor:
        """The tensor again, as it was; compute waits for it if it is still on its way."""
        parked = view.parked
        if parked.lost or not parked.views:
            raise RuntimeError(
                "a saved tensor was asked for twice, or after another forward had begun: each forward is followed by its one backward"
            )
        group = parked.group
        self._bring(group)
        if (before := self._groups.get(group.number - 1)) is not None:
            self._bring(before)
        if group.back is not None:
            self._mover.compute_waits(group.back)
            group.back = None
        assert parked.device is not None
        found = torch.empty(0, dtype=view.dtype, device=parked.device.device)
        found.set_(parked.device.untyped_storage(), view.offset, view.size, view.stride)
        parked.views -= 1
        if parked.views == 0:
            self._drop(parked)
        return found

    def _bring(self, group: _Group) -> None:
        """Starts to copy a group to the device, unless it is there."""
        away = [parked for parked in reversed(group.parked) if parked.device is None]  # as the backward asks for them
        for parked in away:
            parked.device = torch.empty_like(parked.host, device=self._mover.device)
        pairs = [(parked.device, parked.host) for parked in away if parked.device is not None]
        if pairs:
            group.back = self._last_back = self._mover.move_in(pairs, after=group.gone, held=True)

    def _drop(self, parked: _Parked) -> None:
        parked.device = parked.tensor = None
        parked.group.parked.remove(parked)
        while self._stack and self._stack[-1].views == 0:
            self._stack.pop()


def _identity(tensor: Tensor) -> tuple[StorageWeakRef, int]:
    """Of a storage and what was last written to it; while this is held, no other storage can be taken for it."""
    return StorageWeakRef(tensor.untyped_storage()), tensor._version
