"""Layers that pass a state from token to token, such as Mamba, gated delta nets and short convolutions, run on several
sequences at once.

transformers runs such a layer on one sequence, or on a batch of equally long ones, and keeps its state in a cache. Here
its forward is called for each sequence of a pack, on a GPU for batches of them (packed_batches.py), so that no state
crosses from one into the next; and in the paged engine for each sequence with the state that it had. Whatever the layer
computes, it is transformers' own code, but for the functions that have kernels here: the gated delta rule
(delta_rule.py), convolutions (state_convolution.py), and both for one more token (state_steps.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from inspect import Parameter, signature, unwrap
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ebbtide.errors import UserError
from ebbtide.model.delta_rule import RIGHT_SINCE, choose_delta_rule, has_wrong_gradients
from ebbtide.model.delta_sizes import KERNEL_CHANNELS
from ebbtide.model.gated_delta_rule import kernels_compute
from ebbtide.model.load import decoder
from ebbtide.model.packed_batches import PackedBatches, PutInRows, TakeFromRows
from ebbtide.model.row_adapters import row_adapters
from ebbtide.model.state_cache import StateCache
from ebbtide.model.state_convolution import choose_convolution
from ebbtide.model.state_steps import SlotRows, step_in_slots
from ebbtide.system.transformers_internals import DELTA_RULE, state_function

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_LIMIT = (0.0, math.inf)  # of Mamba's time steps
KERNELS = {
    "gated_delta_rule": ("fla", "ebbtide[fla]"),
    "kda": ("fla", "ebbtide[fla]"),
    "mamba2_chunk_scan": ("mamba_ssm", "mamba-ssm causal-conv1d"),
}
"""A part of the names of functions that layers call -> the module with kernels for them, and what to install."""
_ASKS_FOR_STATE = {"get_conv_state", "get_recurrent_state", "get_linear_cache"}  # methods of transformers' caches
_CACHES, _MASKS = {"cache_params", "past_key_values"}, {"attention_mask", "conv_mask"}

StateName = tuple[str, int]
"""A kind of state of a layer, `conv` or `recurrent`, and its number among those of this kind."""
States = dict[StateName, Tensor]
"""The states of some sequences [S, ...]."""


def has_state(module: nn.Module) -> bool:
    """Whether a module passes a state from token to token: whether its forward asks a cache for one."""
    return not _ASKS_FOR_STATE.isdisjoint(_code_names(module))


def _code_names(module: nn.Module) -> Sequence[str]:
    """The functions and attributes that a module's forward names."""
    code = getattr(unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


@dataclass(frozen=True)
class StateRows:
    """Some sequences of a pass that a layer runs on as one batch: sequences of one length, which all begin, or all
    continue from their states."""

    tokens: Tensor  # [S, n]: the indices of their tokens in the pass
    read: Tensor | None
    """[S]: the slots of the states that they continue from; None if they begin."""
    write: Tensor  # [S]: the slots of their states after the pass


class StateSlots(Protocol):
    """The states of sequences, of each layer that has some, in slots."""

    def read(self, layer: int, slots: Tensor) -> States:
        """The states in some slots [S], of one layer."""
        ...

    def write(self, layer: int, slots: Tensor, states: States) -> None:
        """Replaces the states in some slots [S], of one layer."""
        ...

    def in_place(self, layer: int, read: Tensor, write: Tensor) -> dict[StateName, SlotRows] | None:
        """The states of one layer for one more token of some sequences [S], which are read from some slots and written
        to others, or the same; None if there are no kernels for that."""
        ...


@dataclass(frozen=True)
class TensorSlots:
    """Slots that are rows of tensors."""

    layers: Sequence[States]
    """The states of each layer [slots, ...]."""

    def read(self, layer: int, slots: Tensor) -> States:
        return {name: state[slots] for name, state in self.layers[layer].items()}

    def write(self, layer: int, slots: Tensor, states: States) -> None:
        for name, state in self.layers[layer].items():
            state[slots] = states[name].to(state.dtype)

    def in_place(self, layer: int, read: Tensor, write: Tensor) -> None:
        return None


@dataclass(frozen=True)
class StatePass:
    """The sequences of one pass of the paged engine, and the slots with their states."""

    rows: Sequence[StateRows]
    order: Tensor | None
    """[T]: where each token of the pass lies among those of all rows; None if they lie in the pass's order."""
    slots: StateSlots


class StateLayers:
    """All layers of a model that have a state. It knows which sequences the model runs on."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.layers = [StateLayer(self, module) for module in decoder(model).modules() if has_state(module)]
        self.lengths: list[int] | None = None
        """The lengths of packed sequences, in training."""
        self._batches: PackedBatches | None = None
        self.state_pass: StatePass | None = None
        """The pass of the paged engine."""
        if self.layers:
            decoder(model).register_forward_pre_hook(self._begin, with_kwargs=True)
            decoder(model).register_forward_hook(self._end, always_call=True)

    @property
    def hidden_size(self) -> int:
        return int(self._model.config.get_text_config().hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.dtype
        return dtype

    def _begin(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        starts = named.get("cu_seq_lens_q")
        self.lengths, self._batches = None if starts is None else starts.diff().tolist(), None
        self.state_pass = getattr(named.get("paged_pass"), "states", None)

    def batches(self, device: torch.device) -> PackedBatches:
        """The packed sequences as batches; the same for all layers of a pass."""
        if self._batches is None:
            self._batches = PackedBatches.of(self.lengths or [], device)
        return self._batches

    def _end(self, *_: Any) -> None:
        self.state_pass = None  # It holds the slots. The lengths stay: a backward may run layers again.


class StateLayer:
    """The forward of one layer with a state, in place of its own."""

    def __init__(self, owner: StateLayers, module: nn.Module) -> None:
        self.owner, self.module, self._own = owner, module, module.forward
        self._signature = signature(self._own)
        parameters = self._signature.parameters
        self._input = next(iter(parameters))  # what it gets of each token
        self._cache = next(name for name in parameters if name in _CACHES)
        self._rest = next((name for name, one in parameters.items() if one.kind is Parameter.VAR_KEYWORD), None)
        module.forward = self
        choose_delta_rule(module)
        choose_convolution(module)
        if tuple(getattr(module, "time_step_limit", NO_LIMIT)) != NO_LIMIT:
            module.get_submodule("in_proj").register_forward_hook(self._limit_time_steps)

    def __call__(self, *args: Any, **named: Any) -> Any:
        lengths, state_pass = self.owner.lengths, self.owner.state_pass
        if lengths is None and state_pass is None:
            return self._own(*args, **named)
        given = self._signature.bind(*args, **named).arguments
        for name in {self._rest or self._cache, self._cache}:  # sequences are kept apart here, and not by the layer
            given.pop(name, None)
        if any(given.get(name) is not None for name in _MASKS):
            raise UserError(f"a {type(self.module).__name__} of the model is given a mask, which is not supported")
        tokens = given.pop(self._input)
        if state_pass is not None:
            return self._continue(tokens, given, state_pass)
        assert lengths is not None
        return self._separately(tokens, given, lengths)

    def _separately(self, tokens: Tensor, given: dict[str, Any], lengths: list[int]) -> Any:
        """The outputs for packed sequences [1, T, ...]."""
        if self._alone:
            parts = tokens.split(lengths, 1)
            return _gather([self._own(**given, **{self._input: part, self._cache: None}) for part in parts], None)
        batches = self.owner.batches(tokens.device)
        rows: Tensor = PutInRows.apply(tokens[0], batches.tokens, batches.places)  # type: ignore[no-untyped-call]
        parts = rows.split([count * longest for count, longest in batches.sizes])
        outputs = [
            self._own(**given, **{self._input: part.unflatten(0, size), self._cache: None})
            for part, size in zip(parts, batches.sizes, strict=True)
        ]
        return _gather(outputs, batches.places)

    def _continue(self, tokens: Tensor, given: dict[str, Any], state_pass: StatePass) -> Any:
        """The outputs for the sequences of a pass [1, T, ...], whose states are read and written."""
        number, outputs = self.owner.layers.index(self), []
        for rows in state_pass.rows:
            if rows.read is not None and rows.tokens.shape[1] == 1 and self._steps_in_slots:
                in_place = state_pass.slots.in_place(number, rows.read, rows.write)
                if in_place is not None:
                    outputs.append(self._run(tokens[0], rows.tokens, given, in_place)[0])
                    continue
            before = {} if rows.read is None else state_pass.slots.read(number, rows.read)
            output, after = self._run(tokens[0], rows.tokens, given, before)
            state_pass.slots.write(number, rows.write, after)
            outputs.append(output)
        return _gather(outputs, state_pass.order)

    def _step(self, tokens: Tensor, given: dict[str, Any], states: Mapping[StateName, Any]) -> tuple[Any, States]:
        """(the outputs for sequences [S, n, ...], their states after it), from these states on, or none."""
        cache = StateCache(states)
        output = self._own(**given, **{self._input: tokens, self._cache: cache})
        return output, cache.states

    def _run(
        self, tokens: Tensor, places: Tensor, given: dict[str, Any], states: Mapping[StateName, Any]
    ) -> tuple[Any, Any]:
        """`_step` for the tokens of a pass at `places` [S, n], with their adapters: token by token where the layer
        cannot compute several after a state."""
        if not states or places.shape[1] == 1 or self._continues:
            with row_adapters(self.module).chosen_of(places):
                return self._step(tokens[places], given, states)
        outputs = []
        for place in places.split(1, dim=1):
            output, states = self._run(tokens, place, given, states)
            outputs.append(output)
        return _by_token(outputs, lambda some: torch.cat(list(some), 1)), states

    @cached_property
    @torch.no_grad()
    def _continues(self) -> bool:
        """Whether several tokens after a state depend on all of it: transformers' Mamba 1 forgets a part."""
        tokens = torch.arange(4 * self.owner.hidden_size).sin().view(1, 4, -1).to(self._no_tokens)

        def after(states: States) -> Tensor:
            copies = {name: state.clone() for name, state in states.items()}
            output, _ = self._step(tokens[:, 2:], self._empty, copies)
            found: Tensor = output[0] if isinstance(output, tuple) else output
            return found

        with row_adapters(self.module).chosen(None):  # Those of a pass are not of these tokens.
            _, states = self._step(tokens[:, :2], self._empty, {})
            usual = after(states)
            return not any(torch.equal(usual, after({**states, name: -state})) for name, state in states.items())

    def _limit_time_steps(self, layer: nn.Module, given: Any, output: Tensor) -> Tensor:
        """Limits the time steps of Mamba 2, softplus(x + bias), when tokens are sampled as in training: transformers
        does that for several tokens, and not for one."""
        if self.owner.lengths is not None:
            return output
        module: Any = self.module
        low, high = (_softplus_inverse(limit) - module.dt_bias.float() for limit in module.time_step_limit)
        steps = output[..., -module.num_heads :].float().clamp(low, high)
        return torch.cat([output[..., : -module.num_heads], steps.to(output.dtype)], -1)

    @cached_property
    @torch.no_grad()
    def sizes(self) -> States:
        """The states of one sequence [1, ...], for their sizes and types."""
        return self._step(self._no_tokens.new_zeros((1, 1, self.owner.hidden_size)), self._empty, {})[1]

    @property
    def has_delta_kernels(self) -> bool:
        """Whether it is a gated delta net that kernels of ours compute on a GPU."""
        channels = (getattr(self.module, name, 0) for name in ("head_k_dim", "head_v_dim"))
        return state_function(self.module, DELTA_RULE) is not None and kernels_compute(self.owner.dtype, *channels)

    @cached_property
    def _steps_in_slots(self) -> bool:
        """Whether one more token of a sequence can be computed with the states in their slots."""
        return step_in_slots(self.module, {kind for kind, _ in self.sizes})

    @cached_property
    def _alone(self) -> bool:
        """Whether it runs on one packed sequence at a time. Then not even the rounding of one depends on others."""
        return self._no_tokens.device.type == "cpu"

    @property
    def _no_tokens(self) -> Tensor:
        """Of the type and on the device of what it gets. Some of its weights may be kept in float32."""
        return torch.empty(0, dtype=self.owner.dtype, device=next(self.module.parameters()).device)

    @property
    def _empty(self) -> dict[str, Any]:
        """The arguments that it needs beside its input and the cache, when it is run by itself."""
        needed = (name for name, one in self._signature.parameters.items() if one.default is Parameter.empty)
        return {name: None for name in needed if name not in (self._input, self._cache, self._rest)}

    def new_slots(self, count: int) -> States:
        """Allocates slots for the states of so many sequences."""
        return {name: state.new_zeros((count, *state.shape[1:])) for name, state in self.sizes.items()}


def _softplus_inverse(value: float) -> float:
    return -math.inf if value <= 0 else value + math.log(-math.expm1(-value))


def _gather(outputs: Sequence[Any], order: Tensor | None) -> Any:
    """The outputs for several batches [S, n, ...] as one, [1, T, ...], with the tokens in this order."""

    def join(batches: Sequence[Tensor]) -> Tensor:
        tokens = torch.cat([batch.flatten(0, 1) for batch in batches]) if len(batches) > 1 else batches[0].flatten(0, 1)
        if order is not None:
            tokens = TakeFromRows.apply(tokens, order)  # type: ignore[no-untyped-call]
        return tokens[None]

    return _by_token(outputs, join)


def _by_token(outputs: Sequence[Any], join: Callable[[Sequence[Tensor]], Tensor]) -> Any:
    """Several outputs of a layer as one: those of its tensors that have tokens [S, n, ...] are joined, and nothing is
    left of the others, such as a state that it returns as well."""
    if isinstance(outputs[0], Tensor):
        return join(outputs)
    tokens = outputs[0][0].shape[:2]
    return tuple(
        join(parts) if isinstance(parts[0], Tensor) and parts[0].shape[:2] == tokens else None
        for parts in zip(*outputs, strict=True)
    )


def missing_kernels(model: PreTrainedModel) -> str:
    """What to say of layers that run in plain torch on a GPU, because a package with kernels for them is missing."""
    layers = state_layers(model).layers if model.device.type == "cuda" else []
    names = {name for layer in layers if not layer.has_delta_kernels for name in _code_names(layer.module)}
    for part, (package, install) in KERNELS.items():
        if any(part in name for name in names) and find_spec(package) is None:
            return f"layers with states run in plain torch, which is slow: `pip install {install}` has kernels for them"
    if any("gated_delta_rule" in name for name in names) and has_wrong_gradients(model.device):
        return (
            "layers with states train in plain torch, which is slow: flash-linear-attention's gradients need Triton"
            f" {RIGHT_SINCE} or newer on this GPU, or `pip install tilelang`; models of 16 bits with heads of"
            f" {', '.join(map(str, KERNEL_CHANNELS))} channels need neither"
        )
    return ""


def state_layers(model: PreTrainedModel) -> StateLayers:
    """The layers of a model that have a state. Their forwards are replaced when it is first called."""
    found = (module.__dict__.get("forward") for module in decoder(model).modules())
    return next((one.owner for one in found if isinstance(one, StateLayer)), None) or StateLayers(model)
