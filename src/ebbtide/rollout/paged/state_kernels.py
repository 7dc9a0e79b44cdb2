"""Reads and writes the states of sequences in their slots. The addresses of the slots are read on the device: a
captured launch serves every session, whose slots lie elsewhere each time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.model.state_layers import StateLayer, States

SIZE = 2048  # elements that a program copies


@triton.jit(do_not_specialize=["place"])
def _copy_rows(
    rows,  # [S, count]
    addresses,  # int64: where the first slot of each kind of state lies
    slots,  # [S]
    place,  # of the address
    count,
    reads: tl.constexpr,  # from the slots; else to them
    size: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    where = tl.program_id(1) * size + tl.arange(0, size)
    slot = tl.load(slots + row).to(tl.int64)
    state = tl.load(addresses + place).to(tl.pointer_type(rows.dtype.element_ty)) + slot * count + where
    rows += row * count + where
    if reads:
        tl.store(rows, tl.load(state, where < count), where < count)
    else:
        tl.store(state, tl.load(rows, where < count), where < count)


class AddressedSlots:
    """Slots of whichever tensors were attached last."""

    def __init__(self, layers: Sequence[StateLayer], device: torch.device) -> None:
        self._sizes = [layer.sizes for layer in layers]
        names = [(number, name) for number, states in enumerate(self._sizes) for name in states]
        self._places = {key: place for place, key in enumerate(names)}
        self._addresses = torch.zeros(len(names), dtype=torch.long, device=device)

    def attach(self, slots: Sequence[States]) -> int:
        """Uses these slots from now on. Returns the last of them, which is for padding rows."""
        found = [slots[number][name] for number, name in self._places]
        self._addresses.copy_(torch.tensor([state.data_ptr() for state in found]))
        return len(found[0]) - 1

    def read(self, layer: int, slots: Tensor) -> States:
        states = {}
        for name, size in self._sizes[layer].items():
            states[name] = size.new_empty((len(slots), *size.shape[1:]))
            self._copy(layer, name, states[name], slots, reads=True)
        return states

    def write(self, layer: int, slots: Tensor, states: States) -> None:
        for name, size in self._sizes[layer].items():
            self._copy(layer, name, states[name].to(size.dtype).contiguous(), slots, reads=False)

    def _copy(self, layer: int, name: tuple[str, int], rows: Tensor, slots: Tensor, *, reads: bool) -> None:
        count = rows[0].numel()
        grid = (len(rows), triton.cdiv(count, SIZE))
        _copy_rows[grid](rows, self._addresses, slots, self._places[layer, name], count, reads, SIZE)
