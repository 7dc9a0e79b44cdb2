"""Attention over packed sequences, for any transformers model that takes its attention from the registry.

Sequences lie end to end in one row of T tokens. On a GPU in 16 bits torch's varlen flash kernel reads them where they lie. Elsewhere they are laid out
padded on the right, where a causal mask alone keeps real tokens from seeing padding, and gathered back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from ebbtide.errors import UserError

PACKED = "ebbtide_packed"

# torch 2.11 takes fewer key heads than query heads as they are; later ones want to be told.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def refuse_extras(module: nn.Module, softcap: float | None, sinks: Tensor | None) -> None:
    """What some families add to attention and no kernel here has."""
    if softcap is not None or sinks is not None:
        raise UserError(
            f"{type(module).__name__} uses soft-capped attention scores or attention sinks, which attention here does not have: choose another model"
        )


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, channels]
    key: Tensor,  # [1, kv heads, T, channels]
    value: Tensor,  # [1, kv heads, T, channels]
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    cu_seq_lens_q: Tensor,  # [S + 1]: where each sequence starts, and T
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence: [1, T, heads, channels]."""
    refuse_extras(module, softcap, s_aux)
    window = None if sliding_window is None or sliding_window >= max_length_q else sliding_window
    fits = query.shape[-1] <= 256 and query.shape[-1] == value.shape[-1]
    flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and fits
    attend = _varlen if flash else _padded
    return attend(query, key, value, scaling, window, cu_seq_lens_q, max_length_q), None


def _varlen(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, starts: Tensor, longest: int) -> Tensor:
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # [T, heads, channels]
    left = -1 if window is None else window - 1
    mixed = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, window_size=(left, 0), **_GROUPED)
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


AttentionInterface.register(PACKED, packed_attention)


@contextmanager
def counted() -> Iterator[Counter[nn.Module]]:
    """Which modules compute packed attention inside this block, and how often."""
    calls: Counter[nn.Module] = Counter()

    def counting(module: nn.Module, *arguments: Any, **named: Any) -> tuple[Tensor, None]:
        calls[module] += 1
        return packed_attention(module, *arguments, **named)

    AttentionInterface.register(PACKED, counting)
    try:
        yield calls
    finally:
        AttentionInterface.register(PACKED, packed_attention)


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model computes attention with the registered function `name` inside this block."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
