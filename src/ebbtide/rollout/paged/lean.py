"""The model's own blocks in fewer kernels: its matrices are called as they are, and what lies between them is fused.

Families whose blocks are known to be of this kind; their parts are looked at, and the whole is tried against the model's own forward. Any other model runs its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import SiLUActivation

from ebbtide.policy.model import decoder
from ebbtide.rollout.paged import block_kernels
from ebbtide.rollout.paged.device_pass import DevicePass

FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"}
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
        for hook in block._forward_pre_hooks.values():  # such as gathering its weights: the block itself is not called
            hook(block, ())
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
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES or _windowed(config):
        return False
    for block in inner.layers:
        names = {name for name, _ in block.named_parameters()}
        mlp = {name for name in names if name.startswith("mlp.")}
        if not names >= _ALWAYS or names - mlp - _ALWAYS - _MAYBE or block.self_attn.head_dim % 2:
            return False
        if "self_attn.q_norm.weight" in names and block.self_attn.q_norm.weight.numel() != block.self_attn.head_dim:
            return False
        if hasattr(block.mlp, "gate_proj") and not (mlp == _DENSE and isinstance(block.mlp.act_fn, nn.SiLU | SiLUActivation)):
            return False
    return True


def _windowed(config: PretrainedConfig) -> bool:
    """Whether some layer sees only so many tokens back."""
    kinds = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) is not None and (kinds is None or "sliding_attention" in kinds)
