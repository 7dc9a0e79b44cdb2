"""Attention over packed sequences, for any transformers model that uses transformers' attention registry: what its
layers want of attention, and the function that they call in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ebbtide.errors import UserError
from ebbtide.model.attention_kind import AttentionKind
from ebbtide.model.state_layers import state_layers
from ebbtide.policy.packed_attention import PackedAttention
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
_COMPUTED = {"sliding_window", "softcap", "s_aux"}  # Those that make an `AttentionKind`.


def unsupported_layer(module: nn.Module, what: str) -> UserError:
    """The error for a layer that needs attention which no kernel here computes."""
    family = getattr(getattr(module, "config", None), "model_type", "this model")
    layer = getattr(module, "layer_idx", None)
    where = type(module).__name__ if layer is None else f"{type(module).__name__} of layer {layer}"
    return UserError(f"`{family}` cannot be run: {where} {what}, which is not supported: choose another model")


def requested_kind(module: nn.Module, attention_mask: object, requested: Mapping[str, Any]) -> AttentionKind:
    """What a layer wants of attention. What no kernel here computes (`requested`) is refused, because it must not be
    ignored silently."""
    if attention_mask is not None:
        raise unsupported_layer(module, "passes attention a mask of its own")
    if requested.get("is_causal") is False:
        raise unsupported_layer(module, "lets tokens see later tokens (attention that is not causal)")
    for name, value in requested.items():
        off = value is None or (isinstance(value, bool | int | float) and not value)  # No dropout, no cap, no bias.
        if not off and name not in _NO_EFFECT and name not in _COMPUTED:
            raise unsupported_layer(module, f"passes attention `{name}`")
    # Most families pass the window as an argument; Qwen2-MoE keeps it in the layer and relies on a mask, which
    # transformers does not make for our attention.
    window: int | None = requested.get("sliding_window", getattr(module, "sliding_window", None))
    sinks: Tensor | None = requested.get("s_aux", getattr(module, "sinks", None))
    return AttentionKind(window, _chunk(module), requested.get("softcap") or None, sinks)


def _chunk(module: nn.Module) -> int | None:
    """The chunks of a layer whose config says that it has some; it too relies on a mask."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None or layer is None or kinds[layer] != "chunked_attention":
        return None
    size: int | None = getattr(config, "attention_chunk_size", None)
    return size


def scales_by_place(found: object) -> bool:
    """Whether a layer, or the layers that a config describes, scale queries by their places in a row, where padding
    counts as well."""
    return bool(getattr(found, "attn_temperature_tuning", False))


def scaled_by_position(module: nn.Module, query: Tensor, positions: Callable[[], Tensor]) -> Tensor:
    """The queries [1, heads, T, channels] of tokens in a row, scaled by their positions in their sequences ([T], which
    is called for only then): Llama 4's layers without rope have scaled them by their places in the row."""
    if not scales_by_place(module) or getattr(module, "use_rope", True):
        return query
    every, by = float(module.floor_scale), float(module.attn_scale)  # type: ignore[arg-type]
    places = torch.arange(query.shape[2], device=query.device)
    wanted, given = (((at.float() + 1) / every).floor().log1p() * by + 1 for at in (positions(), places))
    return (query * (wanted / given)[:, None]).to(query.dtype)


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, channels]
    key: Tensor,  # [1, kv heads, T, channels]
    value: Tensor,  # [1, kv heads, T, value channels]
    attention_mask: None,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: Tensor | None = None,  # [S + 1]: where each sequence starts, and T
    max_length_q: int = 0,
    **requested: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence: [1, T, heads, value channels]."""
    kind = requested_kind(module, attention_mask, requested)
    if cu_seq_lens_q is None:
        raise unsupported_layer(module, "does not pass attention the starts of packed sequences (`cu_seq_lens_q`)")
    query = scaled_by_position(module, query, partial(_positions, cu_seq_lens_q, query.shape[2]))
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # [T, heads, channels]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return PackedAttention(cu_seq_lens_q, max_length_q, scale, kind).mix(q, k, v).unsqueeze(0), None


def _positions(starts: Tensor, tokens: int) -> Tensor:
    """[T]: the position of each token in its sequence."""
    places = torch.arange(tokens, device=starts.device)
    return places - starts[torch.searchsorted(starts, places, right=True) - 1]


FUNCTIONS[PACKED] = packed_attention


@contextmanager
def use_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Inside this context the model computes attention with the function `name`, ours or transformers' own. Where it
    is ours, layers that pass a state from token to token keep sequences apart as well."""
    from transformers import AttentionInterface

    before = attention_implementation(model.config)
    if before == name:  # It is asked for around a step and again in each forward; to set it goes through all modules.
        yield
        return
    if name in FUNCTIONS:
        AttentionInterface.register(name, FUNCTIONS[name])
        state_layers(model)
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
