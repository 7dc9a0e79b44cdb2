"""The model's own blocks in fewer kernels: the matmuls are the model's modules, and what lies between them is fused.

This serves the families of `FAMILIES`, whose blocks have a known form. Their parameters are checked, and the result is
compared with the model's own forward before it is used. Any other model runs its own forward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ebbtide.model.load import decoder
from ebbtide.rollout.paged import block_kernels
from ebbtide.rollout.paged.attn_metadata import PassMetadata
from ebbtide.system.torch_internals import forward_pre_hooks
from ebbtide.system.transformers_internals import is_silu

FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"}
_ALWAYS = {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
}
_DENSE = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
_MAYBE = {"self_attn.q_norm.weight", "self_attn.k_norm.weight", *(f"self_attn.{name}_proj.bias" for name in "qkvo")}


class FusedModel:
    """Computes the last hidden states from token ids and positions."""

    def __init__(self, model: PreTrainedModel) -> None:
        inner: Any = decoder(model)
        self._model, self._blocks = inner, [_FusedBlock(block) for block in inner.layers]

    def __call__(self, tokens: Tensor, positions: Tensor, metadata: PassMetadata) -> Tensor:
        """Returns the hidden states [T, H]."""
        hidden: Tensor = self._model.embed_tokens(tokens)
        cos, sin = (angles[0].contiguous() for angles in self._model.rotary_emb(hidden[None], positions[None]))
        delta: Tensor | None = None
        for layer, block in enumerate(self._blocks):
            hidden, delta = block(layer, hidden, delta, cos, sin, metadata)
        return block_kernels.add_norm(hidden, delta, self._model.norm.weight, self._model.norm.variance_epsilon)[1]


class _FusedBlock:
    """One transformer block."""

    def __init__(self, block: Any) -> None:
        self._block, self._attention, self._mlp = block, block.self_attn, block.mlp
        self._channels = int(block.self_attn.head_dim)
        self._norms = hasattr(block.self_attn, "q_norm")
        self._eps = float(block.self_attn.q_norm.variance_epsilon) if self._norms else 0.0
        self._gated = hasattr(block.mlp, "gate_proj")

    def __call__(
        self, layer: int, hidden: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, metadata: PassMetadata
    ) -> tuple[Tensor, Tensor]:
        """Takes and returns the residual stream as two tensors: `hidden`, and `delta`, which is yet to be added to
        it."""
        block, attention, mlp = self._block, self._attention, self._mlp
        # The block's own forward is not called, so its hooks are, such as the one that gathers its weights.
        for hook in forward_pre_hooks(block):
            hook(block, ())
        norm = block.input_layernorm
        hidden, normed = block_kernels.add_norm(hidden, delta, norm.weight, norm.variance_epsilon)
        norms = (attention.q_norm.weight, attention.k_norm.weight) if self._norms else None
        states = attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed)
        query = block_kernels.rope_and_write_cache(
            *states,
            norms,
            self._eps,
            cos,
            sin,
            metadata.addresses,
            layer,
            metadata.slots,
            metadata.block,
            self._channels,
        )
        mixed = metadata.attend_to_cache(layer, query, attention.scaling, None)
        norm = block.post_attention_layernorm
        hidden, normed = block_kernels.add_norm(
            hidden, attention.o_proj(mixed.flatten(1)), norm.weight, norm.variance_epsilon
        )
        if self._gated:
            return hidden, mlp.down_proj(block_kernels.silu_and_mul(mlp.gate_proj(normed), mlp.up_proj(normed)))
        found = mlp(normed[None])
        return hidden, (found[0] if isinstance(found, tuple) else found)[0]


def can_fuse(model: PreTrainedModel) -> bool:
    """Tells whether the model's blocks have exactly the parts that the fused kernels compute."""
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
        if hasattr(block.mlp, "gate_proj") and not (mlp == _DENSE and is_silu(block.mlp.act_fn)):
            return False
    return True


def _windowed(config: PretrainedConfig) -> bool:
    """Tells whether some layer has a sliding window."""
    kinds = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) is not None and (kinds is None or "sliding_attention" in kinds)
