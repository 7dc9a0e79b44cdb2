"""The KV cache of fused decoding in plain torch, for the tests of fused blocks on a CPU."""

from __future__ import annotations

from torch import Tensor, arange
from torch.nn.functional import scaled_dot_product_attention

from ebbtide.model.attention_kind import AttentionKind
from ebbtide.model.block_functions import rotate
from ebbtide.model.block_reference import Rotary


class PlainPass:
    """The attention metadata of one pass over one sequence."""

    def __init__(self) -> None:
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}

    def rope_and_write_cache(self, layer: int, qkv: Tensor, rotary: Rotary) -> Tensor:
        query, key = rotate(qkv, rotary)
        values = qkv[:, (rotary.heads + rotary.kv_heads) * rotary.channels :]
        self._cache[layer] = key, values.unflatten(1, (rotary.kv_heads, rotary.channels))
        return query

    def attend_to_cache(self, layer: int, query: Tensor, scale: float, kind: AttentionKind) -> Tensor:
        states = (each.transpose(0, 1) for each in (query, *self._cache[layer]))  # [heads, T, channels]
        seen = kind.sees(arange(len(query))[:, None], arange(len(query)))
        mixed = scaled_dot_product_attention(*states, attn_mask=seen, scale=scale, enable_gqa=True)
        return mixed.transpose(0, 1)
