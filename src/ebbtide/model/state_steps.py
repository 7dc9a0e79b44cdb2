"""What layers with states compute for one more token of each sequence, in the slots where the states are: neither is a
state copied out of its slot, nor back into one.

transformers' layers call a function with the state of a convolution, and one with that of the gated delta rule. In
their place stand functions that take slots for these states as well, and hand anything else to transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from ebbtide.model.state_cache import CONV, RECURRENT
from ebbtide.model.state_convolution import SILU
from ebbtide.system.transformers_internals import CONV_STEP, DELTA_STEP, replace_state_function, state_function


class SlotRows(Protocol):
    """The state of some sequences [S, ...] in their slots: where it is read, and where it is written."""

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
        """The outputs of a convolution [S, C, 1] for one more input [S, C, 1], with `weight` [C, W]."""
        ...

    def apply_delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, normalizes: bool
    ) -> Tensor:
        """The outputs of the gated delta rule [S, 1, heads, V] for one more token (gated_delta_rule.py)."""
        ...


class ConvStep:
    """transformers' update of a convolution's state."""

    def __init__(self, own: Callable[..., Tensor]) -> None:
        self._own = self.__wrapped__ = own

    def __call__(
        self,
        hidden_states: Tensor,
        conv_state: Tensor | SlotRows,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        if isinstance(conv_state, Tensor):
            return self._own(hidden_states, conv_state, weight, bias, activation)
        assert activation is None or activation in SILU
        return conv_state.convolve(hidden_states, weight, bias, silu=activation is not None)


class DeltaStep:
    """transformers' gated delta rule for one token after the other."""

    def __init__(self, own: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
        self._own = self.__wrapped__ = own

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor | SlotRows | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        **named: Any,
    ) -> tuple[Tensor, Tensor | SlotRows | None]:
        if initial_state is None or isinstance(initial_state, Tensor):
            named |= {"initial_state": initial_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            return self._own(query, key, value, g=g, beta=beta, **named)
        inputs = query, key, value, g, beta
        return initial_state.apply_delta_rule(*inputs, normalizes=use_qk_l2norm_in_kernel), initial_state


STEPS: dict[str, tuple[str, Callable[..., Any]]] = {CONV: (CONV_STEP, ConvStep), RECURRENT: (DELTA_STEP, DeltaStep)}
"""A kind of state -> transformers' function of it, and what takes its place."""


def step_in_slots(module: nn.Module, kinds: set[str]) -> bool:
    """Lets a layer, and all others of its class, compute with states in their slots. Returns whether it can: with all
    states, of these kinds, that it has."""
    functions = {kind: state_function(module, STEPS[kind][0]) for kind in kinds & STEPS.keys()}
    if None in functions.values() or functions.keys() != kinds or getattr(module, "activation", "silu") not in SILU:
        return False
    for kind, own in functions.items():
        name, step = STEPS[kind]
        if not isinstance(own, (ConvStep, DeltaStep)):
            replace_state_function(module, name, step(own))
    return True
