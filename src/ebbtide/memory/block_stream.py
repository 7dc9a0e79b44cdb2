"""A holding whose parts are used one after the other, such as the blocks of a frozen model: while it is offloaded, each
part is copied to the device ahead of its use, and freed behind it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ebbtide.memory.holding import Holding, bytes_of
from ebbtide.memory.mover import Move, Mover
from ebbtide.system.torch_internals import storage_id


class BlockStream:
    """The parts of a frozen holding, in the order of their use, or backwards. Two of them are on the device at once:
    the one in use, and the next."""

    def __init__(self, holding: Holding, mover: Mover, parts: Sequence[Sequence[Tensor]]) -> None:
        self.holding, self._mover = holding, mover
        places = {storage_id(tensor): place for place, tensor in enumerate(_one_of_each(holding.tensors()))}
        self._parts = [[places[storage_id(tensor)] for tensor in _one_of_each(part)] for part in parts]
        self._storages = holding.storages()
        self._here: dict[int, Move | None] = {}  # a part on the device -> its copy, until compute has waited for it
        holding.device_part = self._device_bytes

    def need(self, number: int, step: int) -> None:
        """Called before a part is used; `step`: 1 where the one after it comes next, -1 where the one before it. If the
        whole holding is on the device, nothing happens."""
        if not self.holding.away:
            self._here.clear()
            return
        wanted = [one for one in (number, number + step) if 0 <= one < len(self._parts)]
        self._release([one for one in self._here if one not in wanted])
        for one in wanted:
            if one not in self._here:
                self._here[one] = self._copy(one)
        if (move := self._here[number]) is not None:
            self._mover.compute_waits(move)
            self._here[number] = None

    def close(self) -> None:
        """Frees what is on the device, at the end of a phase."""
        if self.holding.away:
            self._release(list(self._here))
        self._here.clear()

    def _device_bytes(self) -> int:
        return sum(self._storages[place].nbytes() for number in self._here for place in self._parts[number])

    def _copy(self, number: int) -> Move:
        pairs = []
        for place in self._parts[number]:
            storage, block = self._storages[place], self.holding.blocks[place]
            storage.resize_(block.size)
            pairs.append((bytes_of(storage), block.data))
        return self._mover.move_in(pairs, after=self.holding.last, kept_by_caller=True)

    def _release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (move := self._here.pop(number)) is not None:  # It was not used.
                self._mover.compute_waits(move)
            for place in self._parts[number]:
                self._storages[place].resize_(0)


def _one_of_each(tensors: Sequence[Tensor]) -> list[Tensor]:
    """One tensor of each storage."""
    return list({storage_id(tensor): tensor for tensor in tensors}.values())
