"""The model's own blocks in fewer kernels: the matmuls are the model's modules, and what lies between them is fused.

This serves the families of model/families.py whose norms the kernels compute. A model's parameters are checked, and the
result is compared with the model's own forward before it is used. Any other model runs its own forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ebbtide.model.families import FAMILIES, Family, family_of, part_of
from ebbtide.model.load import decoder, layers_of
from ebbtide.system.torch_internals import forward_pre_hooks
from ebbtide.system.transformers_internals import is_silu

if TYPE_CHECKING:
    from ebbtide.rollout.paged.attn_metadata import PassMetadata


class FusedModel:
    """Computes the last hidden states from token ids and positions."""

    def __init__(self, model: PreTrainedModel) -> None:
        from ebbtide.rollout.paged import block_kernels  # needs Triton, which `can_fuse` does without

        self._kernels: Any = block_kernels
        inner, family = decoder(model), family_of(model)
        self._embedding, self._rotary = part_of(inner, family.embedding), part_of(inner, family.rotary)
        self._scale = (
            getattr(model.config.get_text_config(), family.embedding_scale) if family.embedding_scale else None
        )
        self._blocks = [_FusedBlock(block, family, block_kernels) for block in layers_of(model) or ()]
        self._norm = part_of(inner, family.last_norm)
        self._eps = float(getattr(self._norm, family.norm_epsilon))

    def __call__(self, tokens: Tensor, positions: Tensor, metadata: PassMetadata) -> Tensor:
        """Returns the hidden states [T, H]."""
        hidden: Tensor = self._embedding(tokens)
        if self._scale is not None:
            hidden = hidden * self._scale
        cos, sin = (angles[0].contiguous() for angles in self._rotary(hidden[None], positions[None]))
        delta: Tensor | None = None
        for layer, block in enumerate(self._blocks):
            hidden, delta = block(layer, hidden, delta, cos, sin, metadata)
        normed: Tensor = self._kernels.add_norm(hidden, delta, self._norm.weight, self._eps)[1]
        return normed


class _FusedBlock:
    """One transformer block."""

    def __init__(self, block: Any, family: Family, kernels: Any) -> None:
        self._block, self._kernels = block, kernels
        self._attention, self._mlp = part_of(block, family.attention), part_of(block, family.mlp)
        self._channels = int(self._attention.head_dim)
        self._query, self._key, self._value, self._output = (part_of(block, path) for path in family.attention_matrices)
        # None in a block with experts
        self._gate, self._up, self._down = (part_of(block, path) for path in family.mlp_matrices)
        self._attn_norm, self._mlp_norm = part_of(block, family.attn_norm), part_of(block, family.mlp_norm)
        self._query_norm, self._key_norm = part_of(block, family.query_norm), part_of(block, family.key_norm)
        self._eps, self._mlp_eps, self._qk_eps = (
            0.0 if norm is None else float(getattr(norm, family.norm_epsilon))
            for norm in (self._attn_norm, self._mlp_norm, self._query_norm)
        )

    def __call__(
        self, layer: int, hidden: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, metadata: PassMetadata
    ) -> tuple[Tensor, Tensor]:
        """Takes and returns the residual stream as two tensors: `hidden`, and `delta`, which is yet to be added to
        it."""
        # The block's own forward is not called, so its hooks are, such as the one that gathers its weights.
        for hook in forward_pre_hooks(self._block):
            hook(self._block, ())
        hidden, normed = self._kernels.add_norm(hidden, delta, self._attn_norm.weight, self._eps)
        norms = None if self._query_norm is None else (self._query_norm.weight, self._key_norm.weight)
        states = self._query(normed), self._key(normed), self._value(normed)
        query = self._kernels.rope_and_write_cache(
            *states,
            norms,
            self._qk_eps,
            cos,
            sin,
            metadata.addresses,
            layer,
            metadata.slots,
            metadata.block,
            self._channels,
        )
        mixed = metadata.attend_to_cache(layer, query, self._attention.scaling, None)
        hidden, normed = self._kernels.add_norm(
            hidden, self._output(mixed.flatten(1)), self._mlp_norm.weight, self._mlp_eps
        )
        if self._gate is not None:
            return hidden, self._down(self._kernels.silu_and_mul(self._gate(normed), self._up(normed)))
        found = self._mlp(normed[None])
        return hidden, (found[0] if isinstance(found, tuple) else found)[0]


def can_fuse(model: PreTrainedModel) -> bool:
    """Tells whether the model's blocks have exactly the parts that the fused kernels compute."""
    config = model.config.get_text_config()
    family = FAMILIES.get(config.model_type)
    inner, blocks = decoder(model), layers_of(model)
    if family is None or not family.can_fuse_decoding or _windowed(config) or not blocks:
        return False
    if None in [part_of(inner, path) for path in (family.embedding, family.rotary, family.last_norm)]:
        return False
    return all(_can_fuse_block(block, family) for block in blocks)


def _can_fuse_block(block: Any, family: Family) -> bool:
    names = {name for name, _ in block.named_parameters()}
    mlp = {name for name in names if name.startswith(f"{family.mlp}.")}
    always, norms = family.block_weights, (family.query_norm, family.key_norm)
    optional = {f"{path}.weight" for path in norms} | {f"{path}.bias" for path in family.attention_matrices}
    attention, query_norm = part_of(block, family.attention), part_of(block, family.query_norm)
    if not names >= always or names - mlp - always - optional:
        return False
    if not hasattr(attention, "scaling") or getattr(attention, "head_dim", 1) % 2:
        return False
    if query_norm is not None and query_norm.weight.numel() != attention.head_dim:
        return False
    dense = mlp == {f"{path}.weight" for path in family.mlp_matrices} and is_silu(part_of(block, family.activation))
    return dense or part_of(block, family.gate) is None


def _windowed(config: PretrainedConfig) -> bool:
    """Tells whether some layer has a sliding window."""
    kinds = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) is not None and (kinds is None or "sliding_attention" in kinds)
