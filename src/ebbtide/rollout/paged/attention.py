"""The paged cache, and the attention function through which any transformers model reads and writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from ebbtide.errors import UserError
from ebbtide.policy.attention import refuse_extras
from ebbtide.rollout.paged.room import Room

PAGED = "ebbtide_paged"


class Cache:
    """Per layer, places for the keys and the values of one token each; kernels lay them out anew within each block. A tensor for each, so that they fit between what else is in memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.layers = list(zip(tensors[::2], tensors[1::2], strict=True))  # keys, values: each [slots, kv heads, channels]


def room_of(config: PretrainedConfig) -> Room:
    """What a model keeps of a token, and what a pass takes beside that."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    experts = int(getattr(text, "num_experts_per_tok", None) or 1)
    return Room(
        layers=int(text.num_hidden_layers),
        heads=int(getattr(text, "num_key_value_heads", None) or heads),
        channels=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        hidden=int(text.hidden_size),
        query_heads=heads,
        mlp=max(int(getattr(text, "intermediate_size", 0)), experts * int(getattr(text, "moe_intermediate_size", None) or 0)),
        vocabulary=int(text.vocab_size),
    )


class Attends(Protocol):
    """One pass through the model."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Writes the keys and values [T, kv heads, channels] of new tokens; what their queries [T, heads, channels] find: [T, heads, channels]."""
        ...


def paged_attention(
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
    paged_pass: Attends,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, T, heads, channels]."""
    refuse_extras(module, softcap, s_aux)
    if key.shape[-1] != value.shape[-1]:
        raise UserError(
            f"{type(module).__name__} has keys and values of different sizes, for which the paged cache has no place: set `rollout.engine: huggingface`"
        )
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return paged_pass.attend(layer, q, k, v, scale, sliding_window).unsqueeze(0), None


AttentionInterface.register(PAGED, paged_attention)
