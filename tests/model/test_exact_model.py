"""The sampler's forward in exact mode, of training's fused blocks, against the model's own, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_families import made
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ebbtide.model.block_functions import rotate
from ebbtide.model.block_reference import Rotary
from ebbtide.model.families import FAMILIES
from ebbtide.model.load import decoder
from ebbtide.policy.fuse import why_not_computed
from ebbtide.rollout.paged.exact_model import ExactModel
from families import SHAPE


class PlainPass:
    """The attention metadata of one pass over one sequence, with a cache in plain torch."""

    def __init__(self) -> None:
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}

    def rope_and_write_cache(self, layer: int, qkv: Tensor, rotary: Rotary) -> Tensor:
        query, key = rotate(qkv, rotary)
        values = qkv[:, (rotary.heads + rotary.kv_heads) * rotary.channels :]
        self._cache[layer] = key, values.unflatten(1, (rotary.kv_heads, rotary.channels))
        return query

    def attend_to_cache(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        states = (each.transpose(0, 1) for each in (query, *self._cache[layer]))  # [heads, T, channels]
        place = torch.arange(len(query))
        before = place[:, None] - place  # by how many tokens a key is before a query
        seen = (before >= 0) & (before < (window or len(query)))
        mixed = scaled_dot_product_attention(*states, attn_mask=seen, scale=scale, enable_gqa=True)
        return mixed.transpose(0, 1)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in FAMILIES),
        ("qwen3_moe", {"mlp_only_layers": [1], "attention_bias": True}),
        ("mistral", {"sliding_window": 5}),
        ("gemma", {"hidden_act": "silu"}),
    ],
)
def test_it_computes_what_the_models_own_forward_does(name: str, changes: dict[str, Any]) -> None:
    model: Any = made(name, **changes)
    assert not why_not_computed(model)
    tokens = torch.arange(9) * 7 % SHAPE["vocab_size"]
    with torch.no_grad():
        found = ExactModel(model)(tokens, torch.arange(9), PlainPass())  # type: ignore[arg-type]
        own = decoder(model)(input_ids=tokens[None]).last_hidden_state[0]
    torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "changes"), [("llama", {"hidden_act": "gelu"}), ("llama", {"mlp_bias": True})])
def test_other_parts_are_named(name: str, changes: dict[str, Any]) -> None:
    assert "block 0 has" in why_not_computed(made(name, **changes))
