"""The paged cache, and the attention function through which any transformers model reads and writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PretrainedConfig

from ebbtide.errors import UserError
from ebbtide.policy.attention import FUNCTIONS, unsupported, window_asked
from ebbtide.rollout.paged.room import Room

PAGED = "ebbtide_paged"


class Cache:
    """Per layer, places for the keys and the values of one token each; kernels lay them out anew within each block. A tensor for each, so that they fit between what else is in memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.layers = list(zip(tensors[::2], tensors[1::2], strict=True))  # keys, values: each [slots, kv heads, channels]


def room_of(config: PretrainedConfig) -> Room:
    """What a model keeps of a token, and what a pass takes beside that."""
    text = config.get_text_config()
    try:
        heads = int(text.num_attention_heads)
        experts = int(getattr(text, "num_experts_per_tok", None) or 1)
        sparse = experts * int(getattr(text, "moe_intermediate_size", None) or 0)
        return Room(
            layers=int(text.num_hidden_layers),
            heads=int(getattr(text, "num_key_value_heads", None) or heads),
            channels=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            hidden=int(text.hidden_size),
            query_heads=heads,
            mlp=max(_largest(getattr(text, "intermediate_size", 0)), sparse),
            vocabulary=int(text.vocab_size),
        )
    except RuntimeError:  # how transformers answers for what differs from layer to layer
        raise not_paged(config, "its layers are of different sizes") from None


def _largest(size: int | Sequence[int]) -> int:
    """Of a size that may be given for each layer."""
    return int(size) if isinstance(size, int) else max(size)


def not_paged(config: PretrainedConfig, why: str) -> UserError:
    """For a model that this engine does not compute, and another one does."""
    family = config.get_text_config().model_type
    other = "set `rollout.engine: huggingface` (`ebbtide serve` has no other engine)"
    return UserError(f"the paged engine cannot run `{family}` ({why}): {other}")


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
    *,
    paged_pass: Attends | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """[1, T, heads, channels]."""
    window = window_asked(module, attention_mask, asked)
    if paged_pass is None:
        raise unsupported(module, "does not tell attention where the cache is")
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return paged_pass.attend(layer, q, k, v, scale, window).unsqueeze(0), None


FUNCTIONS[PAGED] = paged_attention
