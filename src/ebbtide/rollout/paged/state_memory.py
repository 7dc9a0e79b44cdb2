"""The memory of the states that layers such as Mamba pass from token to token: a slot for each sequence, beside the KV
cache, and which of them the sequences of a pass read and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ebbtide.errors import UserError
from ebbtide.model.state_layers import StateRows, States, state_layers
from ebbtide.rollout.paged.cache_costs import FEWEST_STATES, fitting_states
from ebbtide.rollout.paged.scheduler import PrefillChunk

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StateMemory:
    """Allocates the states of sequences. There is one slot more than asked for, which padding rows use."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers = state_layers(model).layers

    @property
    def exist(self) -> bool:
        """Whether the model has layers with states."""
        return bool(self._layers)

    @property
    def slot_bytes(self) -> int:
        """The bytes of the states of one sequence."""
        return sum(state.nbytes for layer in self._layers for state in layer.sizes.values())

    def count(self, useful: int, free: int) -> int | None:
        """Returns how many sequences have states at once: `useful` ones, or as many as fit into a part of the `free`
        bytes; None if there are no states."""
        if not self.exist:
            return None
        each, useful = self.slot_bytes, max(FEWEST_STATES, useful)
        if (fitting := fitting_states(each, useful, free)) < FEWEST_STATES:
            raise UserError(
                f"the states of a sequence need {each / 2**20:,.0f} MiB, and there is no room for {FEWEST_STATES} of"
                " them: free memory for generation (`memory.offload.generate`, `optimizer.place`)"
            )
        return fitting

    def rows(self, count: int | None) -> int:
        """Returns the rows of a tensor with the states of so many sequences."""
        return 0 if count is None else count + 1

    def tensor_bytes(self, count: int | None) -> list[int]:
        """Returns the bytes of each tensor, for the states of so many sequences."""
        return [self.rows(count) * state.nbytes for layer in self._layers for state in layer.sizes.values()]

    def allocate(self, count: int | None) -> list[Tensor]:
        """Allocates the states of so many sequences."""
        return [state for layer in self._layers for state in layer.new_slots(self.rows(count)).values()]

    def by_layer(self, tensors: Sequence[Tensor]) -> list[States]:
        """Returns the tensors of each layer, of all that `allocate` returned."""
        rest = iter(tensors)
        return [{name: next(rest) for name in layer.sizes} for layer in self._layers]


def state_rows(
    chunks: Sequence[PrefillChunk], to_device: Callable[[Sequence[int]], Tensor]
) -> tuple[list[StateRows], Tensor | None]:
    """Returns the sequences of a pass in batches that layers with states run on, and where each token of the pass lies
    among those of all batches; None if they lie in the same order. `to_device` makes a tensor on the device."""
    batches: dict[tuple[bool, int], list[tuple[int, PrefillChunk]]] = {}
    start = 0
    for chunk in chunks:
        length = chunk.last - chunk.first
        batches.setdefault((chunk.states[0] is None, length), []).append((start, chunk))
        start += length
    rows, places = [], []
    for (begins, length), members in batches.items():
        tokens = [first + index for first, _ in members for index in range(length)]
        places += tokens
        read = None if begins else to_device([chunk.states[0] or 0 for _, chunk in members])
        write = to_device([chunk.states[1] for _, chunk in members])
        rows.append(StateRows(to_device(tokens).view(-1, length), read, write))
    if places == list(range(start)):
        return rows, None
    order = torch.empty(start, dtype=torch.long)
    order[torch.tensor(places)] = torch.arange(start)
    return rows, to_device(order.tolist())
