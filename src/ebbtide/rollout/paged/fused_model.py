"""A model's forward for the paged engine, of the same fused blocks as in training: one matmul for queries, keys and
values and one for both halves of an MLP, and fused kernels between the matmuls.

The result is compared with the model's own forward before it is used. A model with other parts runs its own forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebbtide.model.attention_kind import AttentionKind
from ebbtide.model.block_functions import add_norm
from ebbtide.model.families import family_of, part_of
from ebbtide.model.load import decoder
from ebbtide.policy.fuse import build_blocks, why_not_computed
from ebbtide.policy.fused_block import FusedBlock, norm_of
from ebbtide.policy.fused_experts import Experts
from ebbtide.rollout.paged.rotary_tables import RotaryTables, kind_of
from ebbtide.system.torch_internals import forward_pre_hooks

if TYPE_CHECKING:
    from ebbtide.rollout.paged.attn_metadata import PassMetadata


class FusedModel:
    """Computes the last hidden states from token ids and positions."""

    def __init__(self, model: PreTrainedModel) -> None:
        inner, family = decoder(model), family_of(model)
        self._embedding = part_of(inner, family.embedding)
        self._scale = (
            getattr(model.config.get_text_config(), family.embedding_scale) if family.embedding_scale else None
        )
        self._blocks = build_blocks(model)
        for block in self._blocks:
            # Weights that a hook gathers lie side by side, and those of the `gathered` mode do not: both give the same
            # bits.
            if forward_pre_hooks(block.module):
                block.keep_apart()
        self._rotary = RotaryTables(part_of(inner, family.rotary), self._blocks, model.config)
        self._mlps = [part_of(block.module, family.mlp) for block in self._blocks]
        self._last_norm = part_of(inner, family.last_norm)
        self._norm = norm_of(inner, family.last_norm, family)

    def fill_tables(self, positions: int) -> None:
        """Makes tables of what passes need for each of so many positions."""
        weight = self._last_norm.weight
        self._rotary.fill(positions, torch.empty((1, 1), dtype=weight.dtype, device=weight.device))

    def __call__(self, tokens: Tensor, positions: Tensor, metadata: PassMetadata) -> Tensor:
        """Returns the hidden states [T, H]."""
        hidden: Tensor = self._embedding(tokens)
        if self._scale is not None:
            hidden = hidden * self._scale
        angles = self._rotary.at(positions, hidden)
        delta: Tensor | None = None
        for layer, block in enumerate(self._blocks):
            hidden, delta = self._run_block(layer, block, hidden, delta, *angles[kind_of(block)], metadata)
        return add_norm(hidden, delta, self._last_norm.weight, self._norm)[1]

    def _run_block(
        self,
        layer: int,
        block: FusedBlock,
        hidden: Tensor,
        delta: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        metadata: PassMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Takes and returns the residual stream as two tensors: `hidden`, and `delta`, which is yet to be added to
        it."""
        # The block's own forward is not called, so its hooks are, such as the one that gathers its weights.
        for hook in forward_pre_hooks(block.module):
            hook(block.module, ())
        weights = dict(zip(block.names, block.weights, strict=True))
        hidden, normed = block.enter(hidden, delta, weights)
        qkv = block.rotary_input.forward(block.project(normed, weights), weights)
        query = metadata.rope_and_write_cache(layer, qkv, block.rotary(weights, cos, sin))
        mixed = metadata.attend_to_cache(layer, query, block.scale, AttentionKind(block.window))
        hidden, normed = block.after_attention(hidden, mixed, weights)
        if isinstance(block.mlp, Experts) and normed.dtype != torch.bfloat16:  # torch groups matmuls in bfloat16 alone
            found: Any = self._mlps[layer](normed[None])
            return hidden, (found[0] if isinstance(found, tuple) else found)[0]
        return hidden, block.run_mlp(normed, weights)


def can_fuse(model: PreTrainedModel) -> bool:
    """Tells whether the model's blocks have exactly the parts that fused blocks compute."""
    return not why_not_computed(model)
