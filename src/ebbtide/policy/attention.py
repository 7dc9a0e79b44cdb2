"""Attention over packed sequences, for any transformers model that takes its attention from the registry.

Sequences lie end to end in one row of T tokens. On a GPU in 16 bits torch's varlen flash kernel reads them where they lie. Elsewhere they are laid out
padded on the right, where a causal mask alone keeps real tokens from seeing padding, and gathered back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from ebbtide.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKED = "ebbtide_packed"

# By the names under which transformers knows them. It is told when a model is there: its own code for models takes
# seconds to import.
FUNCTIONS: dict[str, Callable[..., tuple[Tensor, None]]] = {}


# What families hand down to attention and which asks nothing of it: positions are in the rotated queries and keys, and
# sequences are known by `cu_seq_lens_q`.
_SAYS_NOTHING = {"position_ids", "cache_position", "cu_seq_lens_k", "max_length_k", "is_causal"}


def unsupported(module: nn.Module, what: str) -> UserError:
    """For a layer that wants of attention what no kernel here computes."""
    family = getattr(getattr(module, "config", None), "model_type", "this model")
    layer = getattr(module, "layer_idx", None)
    where = type(module).__name__ if layer is None else f"{type(module).__name__} of layer {layer}"
    return UserError(f"`{family}` cannot be run: {where} {what}, which is not supported: choose another model")


def window_asked(module: nn.Module, attention_mask: object, asked: Mapping[str, Any]) -> int | None:
    """How many tokens back a layer sees, itself among them; None: all. All else that it asks of attention is refused:
    what is not computed must not be left out in silence."""
    if attention_mask is not None:
        raise unsupported(module, "hands attention a mask of its own")
    if asked.get("is_causal") is False:
        raise unsupported(module, "lets tokens see those that come after them")
    for name, value in asked.items():
        nothing = value is None or (isinstance(value, bool | int | float) and not value)  # no dropout, no cap, no bias
        if not nothing and name not in _SAYS_NOTHING and name != "sliding_window":
            raise unsupported(module, f"hands attention `{name}`")
    # Most families hand the window down; Qwen2-MoE keeps it in the layer and relies on a mask, which is not made for
    # attention of ours.
    window: int | None = asked.get("sliding_window", getattr(module, "sliding_window", None))
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
    **asked: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence: [1, T, heads, channels]."""
    window = window_asked(module, attention_mask, asked)
    if cu_seq_lens_q is None:
        raise unsupported(module, "does not tell attention where packed sequences begin")
    window = None if window is None or window >= max_length_q else window
    fits = query.shape[-1] <= 256 and query.shape[-1] == value.shape[-1]
    flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and fits
    attend = _varlen if flash else _padded
    return attend(query, key, value, scaling, window, cu_seq_lens_q, max_length_q), None


@cache
def _kernel() -> Callable[..., Any]:
    """torch's, imported when a GPU first asks for it: it brings torch's compiler along."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes fewer key heads than query heads as they are; later ones want to be told.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    return partial(varlen_attn, **grouped)


def _varlen(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, starts: Tensor, longest: int) -> Tensor:
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # [T, heads, channels]
    left = -1 if window is None else window - 1
    mixed = _kernel()(q, k, v, starts, starts, longest, longest, scale=scale, window_size=(left, 0))
    assert isinstance(mixed, Tensor)
    return mixed.unsqueeze(0)


def _padded(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, starts: Tensor, longest: int) -> Tensor:
    tokens = query.shape[2]
    lengths = starts.diff()  # [S]
    column = torch.arange(longest, device=query.device)  # [L]
    real = column < lengths[:, None]  # [S, L]
    # Where each place of the padded layout reads from; padding reads an extra row of zeros at the end.
    source = torch.where(real, starts[:-1, None] + column, tokens)  # [S, L]

    def laid_out(states: Tensor) -> Tensor:
        rows = pad(states[0].transpose(0, 1), (0, 0, 0, 0, 0, 1))  # [T + 1, heads, channels]
        return rows[source].transpose(1, 2)  # [S, heads, L, channels]

    mask = None if window is None else (column[:, None] >= column) & (column[:, None] - column < window)
    mixed = scaled_dot_product_attention(
        laid_out(query),
        laid_out(key),
        laid_out(value),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # [S, heads, L, channels]
    return mixed.transpose(1, 2)[real].unsqueeze(0)


FUNCTIONS[PACKED] = packed_attention


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model computes attention with the function `name`, ours or transformers' own, inside this block."""
    from transformers import AttentionInterface

    if name in FUNCTIONS:
        AttentionInterface.register(name, FUNCTIONS[name])
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:  # transformers only warns
        family = model.config.model_type
        raise UserError(f"`{family}` cannot be run: its layers do not take their attention from transformers' registry")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
