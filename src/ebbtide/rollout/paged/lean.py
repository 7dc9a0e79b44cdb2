"""The model's own blocks in fewer kernels: its matrices are called as they are, and what lies between them is fused.

Whether a model's blocks are of this kind is found out by their parameters and by trying: where the result is another than the model's own, its own forward is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebbtide.policy.model import decoder
from ebbtide.rollout.paged import block_kernels
from ebbtide.rollout.paged.device_pass import DevicePass

_ALWAYS = {"input_layernorm.weight", "post_attention_layernorm.weight", *(f"self_attn.{name}_proj.weight" for name in "qkvo")}
_DENSE = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
_MAYBE = {"self_attn.q_norm.weight", "self_attn.k_norm.weight", *(f"self_attn.{name}_proj.bias" for name in "qkvo")}


class LeanModel:
    """Token ids and positions in, last hidden states out."""

    def __init__(self, model: PreTrainedModel) -> None:
        inner: Any = decoder(model)
        self._model, self._blocks = inner, [_LeanBlock(block) for block in inner.layers]

    def __call__(self, tokens: Tensor, positions: Tensor, one: DevicePass) -> Tensor:
        """[T, H]."""
        hidden: Tensor = self._model.embed_tokens(tokens)
        cos, sin = (angles[0].contiguous() for angles in self._model.rotary_emb(hidden[None], positions[None]))
        more: Tensor | None = None
        for layer, block in enumerate(self._blocks):
            hidden, more = block(layer, hidden, more, cos, sin, one)
        return block_kernels.add_norm(hidden, more, self._model.norm.weight, self._model.norm.variance_epsilon)[1]


class _LeanBlock:
    def __init__(self, block: Any) -> None:
        self._block, self._attention, self._mlp = block, block.self_attn, block.mlp
        self._channels = int(block.self_attn.head_dim)
        self._norms = hasattr(block.self_attn, "q_norm")
        self._eps = float(block.self_attn.q_norm.variance_epsilon) if self._norms else 0.0
        self._gated = hasattr(block.mlp, "gate_proj")

    def __call__(self, layer: int, hidden: Tensor, more: Tensor | None, cos: Tensor, sin: Tensor, one: DevicePass) -> tuple[Tensor, Tensor]:
        """The stream of the block's input (`hidden` and what is to be added to it), and so of its output."""
        block, attention, mlp = self._block, self._attention, self._mlp
        norm = block.input_layernorm
        hidden, normed = block_kernels.add_norm(hidden, more, norm.weight, norm.variance_epsilon)
        norms = (attention.q_norm.weight, attention.k_norm.weight) if self._norms else None
        states = attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed)
        query = block_kernels.turn_and_place(
            *states, norms, self._eps, cos, sin, one.addresses, layer, one.slots, one.block, self._channels
        )
        mixed = one.look_up(layer, query, attention.scaling, None)
        norm = block.post_attention_layernorm
        hidden, normed = block_kernels.add_norm(hidden, attention.o_proj(mixed.flatten(1)), norm.weight, norm.variance_epsilon)
        if self._gated:
            return hidden, mlp.down_proj(block_kernels.gate(mlp.gate_proj(normed), mlp.up_proj(normed)))
        found = mlp(normed[None])
        return hidden, (found[0] if isinstance(found, tuple) else found)[0]


def lean_shape(model: PreTrainedModel) -> bool:
    """Whether the blocks have the parts that are fused, and no others."""
    inner: Any = decoder(model)
    blocks = getattr(inner, "layers", None)
    if not isinstance(blocks, nn.ModuleList) or not all(hasattr(inner, name) for name in ("embed_tokens", "rotary_emb", "norm")):
        return False
    for block in blocks:
        names = {name for name, _ in block.named_parameters()}
        rest = names - _ALWAYS - _MAYBE - {name for name in names if name.startswith("mlp.")}
        usual = names >= _ALWAYS and not rest and ("self_attn.q_norm.weight" in names) == ("self_attn.k_norm.weight" in names)
        dense = {name for name in names if name.startswith("mlp.")} == _DENSE
        activation = getattr(block.mlp, "act_fn", None)
        silu = activation is not None and torch.equal(activation(torch.tensor([1.0, -2.0])), nn.functional.silu(torch.tensor([1.0, -2.0])))
        windowed = getattr(block.self_attn, "sliding_window", None) is not None
        norms = all(hasattr(norm, "variance_epsilon") for norm in (block.input_layernorm, block.post_attention_layernorm, inner.norm))
        if not usual or windowed or not norms or (dense and not silu) or getattr(block.self_attn, "head_dim", 1) % 2:
            return False
    return True
