"""The paged cache, and the attention function through which any transformers model reads and writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from ebbtide.policy.attention import refuse_extras

PAGED = "ebbtide_paged"
DRAWN_AT_ONCE = 512  # rows of logits in memory, after prompts were read
ROWS_CUT_AT_ONCE = 64  # of those, sorted at once for top-k and top-p


class Cache:
    """Per layer, places for the keys and the values of one token each; kernels lay them out anew within each block. A tensor for each, so that they fit between what else is in memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.layers = list(zip(tensors[::2], tensors[1::2], strict=True))  # keys, values: each [slots, kv heads, channels]


class Shape:
    """What a model keeps of a token, and what a pass takes beside that."""

    def __init__(self, config: PretrainedConfig) -> None:
        text = config.get_text_config()
        self.layers = int(text.num_hidden_layers)
        self.heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        self.channels = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        experts = int(getattr(text, "num_experts_per_tok", None) or 1)
        mlp = max(int(getattr(text, "intermediate_size", 0)), experts * int(getattr(text, "moe_intermediate_size", None) or 0))
        self._token = 8 * int(text.hidden_size) + 4 * int(text.num_attention_heads) * self.channels + 4 * mlp  # numbers, at most at once
        self._queries, self._vocabulary = int(text.num_attention_heads) * self.channels, int(text.vocab_size)

    def bytes(self, dtype: torch.dtype) -> int:
        return 2 * self.layers * self.heads * self.channels * dtype.itemsize

    def workspace(self, dtype: torch.dtype, chunk: int, batch: int) -> int:
        """Bytes for reading `chunk` tokens at once, and for decoding and drawing for `batch` samples."""
        reading = chunk * self._token * dtype.itemsize
        drawing = 2 * min(batch, DRAWN_AT_ONCE) * self._vocabulary * dtype.itemsize + ROWS_CUT_AT_ONCE * self._vocabulary * 40
        return reading + drawing + 32 * batch * self._queries * 4  # the last: attention in parts, at most so many


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
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return paged_pass.attend(layer, q, k, v, scale, sliding_window).unsqueeze(0), None


AttentionInterface.register(PAGED, paged_attention)
