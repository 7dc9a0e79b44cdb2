"""Attention over packed sequences, for any transformers model that uses transformers' attention registry.

Sequences are concatenated into one row of T tokens. On a GPU in 16 bits, torch's varlen flash kernel reads them in
place. Elsewhere they are padded on the right, where a causal mask alone keeps real tokens from seeing padding, and
packed again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from ebbtide.errors import UserError
from ebbtide.system.torch_internals import flash_backward, flash_forward
from ebbtide.system.transformers_internals import attention_implementation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKED = "ebbtide_packed"

# Our attention functions by the names under which they are registered. That happens once there is a model, because
# transformers' code for models takes seconds to import.
FUNCTIONS: dict[str, Callable[..., tuple[Tensor, None]]] = {}


# Arguments that families pass to attention and that do not change it: positions are in the rotated queries and keys,
# and sequences are known by `cu_seq_lens_q`.
_NO_EFFECT = {"position_ids", "cache_position", "cu_seq_lens_k", "max_length_k", "is_causal"}


def unsupported_layer(module: nn.Module, what: str) -> UserError:
    """The error for a layer that needs attention which no kernel here computes."""
    family = getattr(getattr(module, "config", None), "model_type", "this model")
    layer = getattr(module, "layer_idx", None)
    where = type(module).__name__ if layer is None else f"{type(module).__name__} of layer {layer}"
    return UserError(f"`{family}` cannot be run: {where} {what}, which is not supported: choose another model")


def requested_window(module: nn.Module, attention_mask: object, requested: Mapping[str, Any]) -> int | None:
    """A layer's sliding window: how many tokens a token sees, including itself; None is all before it. Anything else
    that the layer requests of attention (`requested`) is refused, because it must not be ignored silently."""
    if attention_mask is not None:
        raise unsupported_layer(module, "passes attention a mask of its own")
    if requested.get("is_causal") is False:
        raise unsupported_layer(module, "lets tokens see later tokens (attention that is not causal)")
    for name, value in requested.items():
        off = value is None or (isinstance(value, bool | int | float) and not value)  # No dropout, no cap, no bias.
        if not off and name not in _NO_EFFECT and name != "sliding_window":
            raise unsupported_layer(module, f"passes attention `{name}`")
    # Most families pass the window as an argument; Qwen2-MoE keeps it in the layer and relies on a mask, which
    # transformers does not make for our attention.
    window: int | None = requested.get("sliding_window", getattr(module, "sliding_window", None))
    return window


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, channels]
    key: Tensor,  # [1, kv heads, T, channels]
    value: Tensor,  # [1, kv heads, T, channels]
    attention_mask: None,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: Tensor | None = None,  # [S + 1]: where each sequence starts, and T
    max_length_q: int = 0,
    **requested: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence: [1, T, heads, channels]."""
    window = requested_window(module, attention_mask, requested)
    if cu_seq_lens_q is None:
        raise unsupported_layer(module, "does not pass attention the starts of packed sequences (`cu_seq_lens_q`)")
    window = None if window is None or window >= max_length_q else window
    attend = _varlen if has_flash(query.device, query.dtype, query.shape[-1], value.shape[-1]) else _padded
    return attend(query, key, value, scaling, window, cu_seq_lens_q, max_length_q), None


def has_flash(device: torch.device, dtype: torch.dtype, channels: int, value_channels: int) -> bool:
    """Whether torch's flash kernels compute such attention."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and channels == value_channels <= 256


@dataclass(frozen=True)
class PackedAttention:
    """Causal attention within packed sequences, with a backward that is called by name instead of by autograd."""

    starts: Tensor
    """[S + 1]: where each sequence starts, and T."""
    longest: int
    scale: float
    window: int | None = None
    """How many tokens a token sees, including itself; None is all before it."""
    exact: bool = False
    """Whether the forward has the bits of the paged engine's."""

    def _flash(self) -> dict[str, Any]:
        left = -1 if self.window is None or self.window >= self.longest else self.window - 1
        return {"starts": self.starts, "longest": self.longest, "scale": self.scale, "window": (left, 0)}

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(the mixed values [T, heads, channels], what the backward needs besides), of queries [T, heads, channels],
        and keys and values [T, kv heads, channels]."""
        if self.exact:
            from ebbtide.model.attention_kernels import attend_packed  # It needs triton, which torch brings on a GPU.

            return attend_packed(query, key, value, self.starts, self.longest, self.scale, self.window)
        if has_flash(query.device, query.dtype, query.shape[-1], value.shape[-1]):
            return flash_forward(query, key, value, **self._flash())
        return self._mix(query, key, value), query.new_empty(0)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values; `mixed` and `sums` are what the forward returned."""
        if has_flash(query.device, query.dtype, query.shape[-1], value.shape[-1]):
            return flash_backward(grad, query, key, value, mixed, sums, **self._flash())
        inputs = [one.detach().requires_grad_() for one in (query, key, value)]
        with torch.enable_grad():
            again = self._mix(*inputs)
        dquery, dkey, dvalue = torch.autograd.grad(again, inputs, grad)
        return dquery, dkey, dvalue

    def _mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (one.transpose(0, 1)[None] for one in (query, key, value))  # [1, heads, T, channels]
        window = None if self.window is None or self.window >= self.longest else self.window
        return _padded(q, k, v, self.scale, window, self.starts, self.longest)[0]


@cache
def _kernel() -> Callable[..., Any]:
    """torch's varlen kernel, imported when it is first needed: the import loads torch's compiler."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 accepts fewer key heads than query heads as they are; later versions need a flag.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    return partial(varlen_attn, **grouped)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, starts: Tensor, longest: int
) -> Tensor:
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # [T, heads, channels]
    left = -1 if window is None else window - 1
    mixed = _kernel()(q, k, v, starts, starts, longest, longest, scale=scale, window_size=(left, 0))
    assert isinstance(mixed, Tensor)
    return mixed.unsqueeze(0)


def _padded(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, starts: Tensor, longest: int
) -> Tensor:
    tokens = query.shape[2]
    lengths = starts.diff()  # [S]
    column = torch.arange(longest, device=query.device)  # [L]
    real = column < lengths[:, None]  # [S, L]
    # The row that each position of the padded layout reads; padding reads an extra row of zeros at the end.
    source = torch.where(real, starts[:-1, None] + column, tokens)  # [S, L]

    def pad_right(states: Tensor) -> Tensor:
        rows = pad(states[0].transpose(0, 1), (0, 0, 0, 0, 0, 1))  # [T + 1, heads, channels]
        return rows[source].transpose(1, 2)  # [S, heads, L, channels]

    mask = None if window is None else (column[:, None] >= column) & (column[:, None] - column < window)
    mixed = scaled_dot_product_attention(
        pad_right(query),
        pad_right(key),
        pad_right(value),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # [S, heads, L, channels]
    return mixed.transpose(1, 2)[real].unsqueeze(0)


FUNCTIONS[PACKED] = packed_attention


@contextmanager
def use_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Inside this context the model computes attention with the function `name`, ours or transformers' own."""
    from transformers import AttentionInterface

    before = attention_implementation(model.config)
    if before == name:  # It is asked for around a step and again in each forward; to set it goes through all modules.
        yield
        return
    if name in FUNCTIONS:
        AttentionInterface.register(name, FUNCTIONS[name])
    model.set_attn_implementation(name)
    if attention_implementation(model.config) != name:  # transformers only warns.
        family = model.config.model_type
        raise UserError(
            f"`{family}` cannot be run: its layers do not use transformers' attention registry: choose another model"
        )
    try:
        yield
    finally:
        model.set_attn_implementation(before)
