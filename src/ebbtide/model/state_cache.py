"""The cache through which a layer of transformers gets the states of some sequences, and leaves those after it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

MOST_STATES = 8  # of one kind in a layer


class StateCache(Cache):  # type: ignore[misc]
    """A cache of transformers for one layer with these states, under whatever number that layer has."""

    def __init__(self, states: dict[tuple[str, int], Tensor]) -> None:
        self._layer = LinearAttentionLayer(number_of_states=MOST_STATES)
        super().__init__(layers=_Always([self._layer]))
        for (kind, number), state in states.items():
            getattr(self._layer, f"{kind}_states")[number] = state
            getattr(self._layer, f"is_{kind}_states_initialized")[number] = True
            self._layer.has_previous_state[number] = True
            self._layer.device, self._layer.dtype = state.device, state.dtype
            if kind == "conv":
                self._layer.conv_kernel_size[number] = state.shape[-1]

    def states(self) -> dict[tuple[str, int], Tensor]:
        kinds = {"conv": self._layer.conv_states, "recurrent": self._layer.recurrent_states}
        return {
            (kind, number): state for kind, of in kinds.items() for number, state in of.items() if state is not None
        }

    # The names under which MiniMax asks for its state.

    def get_linear_cache(self, layer: int) -> Tensor | None:
        state: Tensor | None = self._layer.recurrent_states[0]
        return state

    def set_linear_cache(self, layer: int, state: Tensor) -> None:
        self._layer.recurrent_states[0] = state


class _Always(list[Any]):
    """A list with the same item everywhere."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)
