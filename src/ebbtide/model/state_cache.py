"""The cache through which a layer of transformers gets the states of some sequences, and leaves those after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

CONV, RECURRENT = "conv", "recurrent"


class StateCache:
    """What such layers ask of a cache of transformers, for one layer, under whatever number that layer has. Where
    there is no state yet, the layer begins with none."""

    def __init__(self, states: Mapping[tuple[str, int], Any]) -> None:
        self.states = dict(states)
        """By kind and number: tensors, which layers also change in place, or their slots (state_steps.py)."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """The last inputs of a convolution [S, channels, kernel size]."""
        return self.states.get((CONV, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Adds inputs of a convolution [S, channels, n]. Returns them with those before them."""
        before = self.states.get((CONV, state_idx))
        if before is None:
            size = conv_kernel_size or conv_states.shape[-1]
            found = pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size = before.shape[-1]
            found = torch.cat([before, conv_states], -1)
        self.states[CONV, state_idx] = found[..., -size:].contiguous()
        return found

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """The state that was carried from token to token."""
        return self.states.get((RECURRENT, state_idx))

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **_: Any) -> Any:
        """Replaces the state that is carried on."""
        self.states[RECURRENT, state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether there is a state to continue from."""
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether states can be taken back: never here."""
        return False

    # The names under which MiniMax asks for its state.

    def get_linear_cache(self, layer_idx: int) -> Any:
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        self.update_recurrent_state(state, layer_idx)
