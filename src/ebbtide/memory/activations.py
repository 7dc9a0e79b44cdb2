"""Tensors that wait on the host between the forward that made them and the backward that needs them.

They lie end to end in one pinned block, in the order in which they come; the backward takes them in reverse, so it fills and empties like a stack,
whatever their shapes. Tensors come in groups, one per block of the model. A group's device memory is given up when the group after the next begins: compute
then waits for its copies, which are long over if the link keeps up, and the host never does. In the backward, the first tensor asked of a group
brings the group before it back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.memory.mover import Move, Mover

ALIGNMENT = 512  # bytes
WINDOW = 2  # groups whose device memory is still there while their copies run


@dataclass
class _Parked:
    """The bytes of one storage: on the host, and on the device while they are (still, or again) there."""

    group: int
    host: Tensor
    offset: int
    device: Tensor | None
    gone: Move
    """The copy to the host."""
    back: Move | None = None
    """The copy to the device that compute has not waited for yet."""
    views: int = 0
    """Saved tensors that still need it."""
    lost: bool = False


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
        self._groups: dict[int, list[_Parked]] = {}
        self._stack: list[_Parked] = []
        self._known: dict[tuple[StorageWeakRef, int], _Parked] = {}
        self._group = -1
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
            for move in (parked.gone, parked.back):
                self._mover.host_waits(move)
            parked.lost, parked.device = True, None
        self._groups, self._stack, self._known, self._group = {}, [], {}, -1

    def enter(self, group: int) -> None:
        if group <= self._group:
            self.reset()
        self._group = group
        self._groups[group] = []
        self._known = {}
        self._release(group - WINDOW)

    def _release(self, number: int) -> None:
        """Gives up a group's device memory: what compute does from here on comes after its copies."""
        group = self._groups.get(number)
        if group:
            self._mover.compute_waits(group[-1].gone)
        for parked in group or []:
            parked.device = None

    def knows(self, tensor: Tensor) -> bool:
        """Its storage is on its way to the host already, for another tensor's sake."""
        return _identity(tensor) in self._known

    def park(self, tensor: Tensor) -> View | None:
        """Starts to copy a tensor's storage to the host, if it is not on its way already; None where there is no room."""
        known = _identity(tensor)
        parked = self._known.get(known)
        if parked is None:
            parked = self._copied(tensor.untyped_storage())
            if parked is None:
                return None
            self._known[known] = parked
        parked.views += 1
        return View(parked, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _copied(self, storage: torch.UntypedStorage) -> _Parked | None:
        size = storage.nbytes()
        top = self._stack[-1].offset + self._stack[-1].host.numel() if self._stack else 0
        offset = -(-top // ALIGNMENT) * ALIGNMENT
        if offset + size > self._memory.numel():
            self._refused_bytes += size
            return None
        host = self._memory[offset : offset + size]
        device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        # What lay here in the last micro-batch may still be on its way back.
        move = self._mover.move_out([(device, host)], after=self._last_back, held=True)
        parked = _Parked(self._group, host, offset, device, move)
        self._stack.append(parked)
        self._groups[self._group].append(parked)
        self._parked_bytes += size
        return parked

    def fetch(self, view: View) -> Tensor:
        """The tensor again, as it was; compute waits for it if it is still on its way."""
        parked = view.parked
        if parked.lost or not parked.views:
            raise RuntimeError(
                "a saved tensor was asked for twice, or after another forward had begun: each forward is followed by its one backward"
            )
        self._bring(parked)
        for other in reversed(self._groups.get(parked.group - 1, [])):  # as the backward will ask for them
            self._bring(other)
        if parked.back is not None:
            self._mover.compute_waits(parked.back)
            parked.back = None
        assert parked.device is not None
        found = torch.empty(0, dtype=view.dtype, device=parked.device.device)
        found.set_(parked.device.untyped_storage(), view.offset, view.size, view.stride)
        parked.views -= 1
        if parked.views == 0:
            self._drop(parked)
        return found

    def _bring(self, parked: _Parked) -> None:
        if parked.device is None and parked.views:
            parked.device = torch.empty_like(parked.host, device=self._mover.device)
            parked.back = self._last_back = self._mover.move_in([(parked.device, parked.host)], after=parked.gone, held=True)

    def _drop(self, parked: _Parked) -> None:
        parked.device = None
        while self._stack and self._stack[-1].views == 0:
            self._stack.pop()


def _identity(tensor: Tensor) -> tuple[StorageWeakRef, int]:
    """Of a storage and what was last written to it; while this is held, no other storage can be taken for it."""
    return StorageWeakRef(tensor.untyped_storage()), tensor._version
