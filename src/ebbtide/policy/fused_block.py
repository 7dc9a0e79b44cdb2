"""A transformer block as one autograd function: matmuls, attention, and a few fused kernels between them.

transformers' own blocks run some forty kernels forward and twice that backward, most of which only read and write
memory, and autograd saves their results. Here a block saves the tensors below, each under the name of
`memory.activations` that its module has, and its backward recomputes from them what is elementwise: norms, rotary
embeddings, gates.

    block_input  the input                                   attn_proj  the values mixed by attention
    core_attn    queries, keys and values as projected       mlp_norm   the residual stream after attention; what
                                                                        attention and MLP return, if that is normalized
    mlp_act      both halves of the gated MLP, projected     (moe_router, moe_act: see fused_experts.py)

What is not saved is recomputed from what comes before it, by the same kernels on the same numbers: the gradients are
the same to the bit whatever is kept, offloaded or recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ebbtide.model.block_functions import (
    Norm,
    Rotary,
    add_norm,
    norm_backward,
    rotate,
    rotate_backward,
    rotate_expanded,
)
from ebbtide.model.families import Family, part_of
from ebbtide.model.quantized_layers import layer_columns
from ebbtide.policy.packed_attention import PackedAttention
from ebbtide.policy.projection import Projection
from ebbtide.policy.rotary_input import RotaryInput
from ebbtide.policy.saved_activations import Dropped, Saved, recompute_or, taken

Grads = dict[str, Tensor | None]
"""Name of a weight -> its gradient."""
Weights = dict[str, Tensor]
"""Name of a weight -> what it is in a call."""


class FusedMLP(Protocol):
    """The second half of a block, from its norm's output to what is added to the residual stream."""

    @property
    def names(self) -> Sequence[str]:
        """Paths of its weights in the block, in the order of the autograd function's inputs."""

    @property
    def projections(self) -> Sequence[Projection]:
        """Its linear layers."""

    def forward(self, normed: Tensor, weights: Weights, saved: Saved) -> Tensor: ...

    def backward(
        self,
        grad: Tensor,
        remake: Callable[[], Tensor],
        weights: Weights,
        saved: Saved,
        grads: Grads,
        *,
        wants: bool,
    ) -> tuple[Tensor, Callable[[Tensor], None]]:
        """(the gradient of the norm's output, a function that is called with that output and sets the gradients of the
        weights). `remake` recomputes that output; `wants`: whether gradients of matrices are wanted, besides those of
        adapters."""


@dataclass(frozen=True)
class Call:
    """What one forward of a block is given besides its input."""

    cos: Tensor  # [T, channels]
    sin: Tensor
    attention: PackedAttention
    saved: Saved


class FusedBlock:
    """The computation of one block of a model, on packed tokens."""

    def __init__(self, block: nn.Module, family: Family, mlp: FusedMLP) -> None:
        self.module, self.mlp = block, mlp
        attention = part_of(block, family.attention)
        self.channels = int(attention.head_dim)
        self.heads = layer_columns(part_of(block, family.output)) // self.channels
        keys = len(part_of(block, family.key).weight) // self.channels
        self.kv_heads = (keys - self.heads) // 2 if family.has_packed_qkv else keys
        self.scale = float(attention.scaling)
        owner = attention.config if family.window_in_config else attention
        self.window: int | None = getattr(owner, "sliding_window", None)
        self.rotates = bool(getattr(attention, family.rotates)) if family.rotates else True
        """Whether it has rotary embeddings."""
        if family.rotates_if_sliding and self.window is not None and not attention.is_sliding:
            self.window, self.rotates = None, False
        by_layer = attention.config.layer_types if family.rotary_by_layer else None
        self.rotary_kind: tuple[str, ...] = (by_layer[attention.layer_idx],) if by_layer else ()
        """What the model's rotary module is told besides positions: the kind of this layer, if kinds have their own."""
        self._residual_scale = float(getattr(block, family.residual_scale)) if family.residual_scale else 1.0
        self._norm = norm_of(block, family.stream_norms[0], family)
        self._has_qk_norm = part_of(block, family.query_norm) is not None
        self._qk_norm = norm_of(block, family.query_norm, family) if self._has_qk_norm else Norm(0.0)
        self._qkv = Projection(block, list(dict.fromkeys((family.query, family.key, family.value))))
        self._output = Projection(block, [family.output])
        self._projections = [self._qkv, self._output, *mlp.projections]
        qk_norms = (f"{family.query_norm}.weight", f"{family.key_norm}.weight") if self._has_qk_norm else ()
        self._norms = () if family.qk_norm_over_heads else qk_norms
        self.rotary_input = RotaryInput(self.heads, self.kv_heads, self.channels)
        if family.qk_norm_over_heads:
            self.rotary_input.normalize(qk_norms, self._qk_norm)
        factor = rotary_factor(attention.config) if family.partial_rotary else 1.0
        self.rotary_input.pair(int(factor * self.channels), interleaved=family.interleaved_rotary)
        self._pre_norms = [f"{path}.weight" for path in (family.attn_norm, family.mlp_norm) if path]
        self._post_norms = [f"{path}.weight" for path in family.post_norms]
        norms = *self._pre_norms, *self._post_norms, *qk_norms
        self.adapter_names = [name for one in self._projections for name in one.adapter_names]
        """Paths of the weights of its adapters."""
        self.names = (*norms, *self._qkv.names, *self._output.names, *mlp.names, *self.adapter_names)
        """Paths of the weights, in the order of the autograd function's inputs."""
        self._places = [_place(block, name) for name in self.names]
        self.needed: Callable[[int], None] = lambda step: None
        """Called before it computes, with 1 in a forward and -1 in a backward: the next one is then the block after it,
        or before it."""

    @property
    def kind(self) -> tuple[object, ...]:
        """What blocks of a model may differ in."""
        return type(self.mlp), self.window, self.rotary_kind, self.rotates

    @property
    def joinable(self) -> list[list[Tensor]]:
        """Parameters that are multiplied with the same input."""
        paths = [some for one in self._projections for some in one.joinable]
        return [[self.module.get_parameter(name) for name in some] for some in paths if len(some) > 1]

    def __call__(self, hidden: Tensor, call: Call) -> Tensor:
        """The block's output [1, T, H]. The weights are read now: FSDP gathers them for this call, and a reference
        has others."""
        self.needed(1)
        weights = self.weights
        if torch.is_grad_enabled() and (hidden.requires_grad or any(one.requires_grad for one in weights)):
            found: Tensor = _Block.apply(hidden, self, call, *weights)  # type: ignore[no-untyped-call]
            return found
        return self.forward(hidden[0], dict(zip(self.names, weights, strict=True)), call, Dropped())[None]

    @property
    def weights(self) -> list[Tensor]:
        """The module's weights, in the order of `names`."""
        return [getattr(owner, name) for owner, name in self._places]

    def keep_apart(self) -> None:
        """Multiplies matrices one by one with few rows, even where they follow each other in memory: the bits are then
        those of weights that do not."""
        for one in self._projections:
            one.keep_apart()

    # Forward

    def forward(self, x: Tensor, weights: Weights, call: Call, saved: Saved) -> Tensor:
        saved.put("block_input", x)
        qkv = self.project(self.enter(x, None, weights)[1], weights)
        saved.put("core_attn", qkv)
        mixed, sums = call.attention.forward(*self._rotate(qkv, weights, call))
        del qkv
        saved.put("attn_proj", mixed, sums)
        output = self._project_back(mixed, weights)
        added, normed = self._add_attention(x, output, weights)
        outputs = [output] if self._post_norms else []
        del mixed, sums, x, output
        if not outputs:
            saved.put("mlp_norm", added)
        found = self.mlp.forward(normed, weights, saved)
        if outputs:
            saved.put("mlp_norm", added, *outputs, found)
        return self._normed_output(found, weights, 1).add_(added)

    def run_mlp(self, normed: Tensor, weights: Weights) -> Tensor:
        """What the MLP adds to the residual stream."""
        return self._normed_output(self.mlp.forward(normed, weights, Dropped()), weights, 1)

    def _normed_output(self, output: Tensor, weights: Weights, number: int) -> Tensor:
        """What the output of attention (0) or MLP (1) adds to the residual stream."""
        if not self._post_norms:
            return self._scaled(output)
        return add_norm(output, None, weights[self._post_norms[number]], self._norm)[1]

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self._residual_scale == 1.0 else x * self._residual_scale

    def enter(self, x: Tensor, delta: Tensor | None, weights: Weights) -> tuple[Tensor, Tensor]:
        """The residual stream at the block's input, which is x + delta, and its norm."""
        return self._add(x, delta, weights, 0)

    def _add(self, x: Tensor, delta: Tensor | None, weights: Weights, number: int) -> tuple[Tensor, Tensor]:
        """The residual stream, which is x + delta, and what attention (0) or MLP (1) is given of it: its norm, if it
        has one."""
        if self._pre_norms:
            return add_norm(x, delta, weights[self._pre_norms[number]], self._norm)
        added = x if delta is None else x + delta
        return added, added

    def project(self, normed: Tensor, weights: Weights) -> Tensor:
        """Queries, keys and values of all heads [T, (heads + 2 kv heads) * channels]."""
        return self._qkv(normed, weights)

    def _rotate(self, qkv: Tensor, weights: Weights, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys after their norms and rotary embeddings, and the values, each [T, heads, channels]."""
        query, key = rotate(self.rotary_input.forward(qkv, weights), self.rotary(weights, call.cos, call.sin))
        value = qkv[:, (self.heads + self.kv_heads) * self.channels :].unflatten(1, (self.kv_heads, self.channels))
        return query, key, value

    def rotary(self, weights: Weights, cos: Tensor, sin: Tensor) -> Rotary:
        """How its queries and keys rotate by angles [T, channels]."""
        norms = (weights[self._norms[0]], weights[self._norms[1]]) if self._norms else None
        return Rotary(self.heads, self.kv_heads, self.channels, norms, self._qk_norm, cos, sin)

    def after_attention(self, x: Tensor, mixed: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        """The residual stream after attention, and its norm."""
        return self._add_attention(x, self._project_back(mixed, weights), weights)

    def _project_back(self, mixed: Tensor, weights: Weights) -> Tensor:
        """The output of attention."""
        return self._output(mixed.flatten(1), weights)

    def _add_attention(self, x: Tensor, output: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        return self._add(x, self._normed_output(output, weights, 0), weights, 1)

    # Backward

    def backward(self, grad: Tensor, weights: Weights, call: Call, *, wants: bool) -> tuple[Tensor, Grads]:
        """(the gradient of the input, the gradients of the weights; of matrices only if it `wants` them)."""
        saved, grads = call.saved, Grads()
        (x,) = taken(saved, "block_input")
        # What was dropped, from what comes before it.
        qkv = recompute_or(saved.take("core_attn"), lambda: self.project(self.enter(x, None, weights)[1], weights))
        attended = saved.take("attn_proj")
        mixed, sums = attended or call.attention.forward(*self._rotate(qkv, weights, call))
        del attended
        added, *outputs = saved.take("mlp_norm") or self._after_attention(x, mixed, weights)
        remake = partial(self._remade, added, weights)
        dfound = self._output_backward(grad, outputs, weights, 1, grads)
        dnormed, finish = self.mlp.backward(dfound, remake, weights, saved, grads, wants=wants)
        dadded = self._add_backward(added, dnormed, grad, weights, 1, grads, finish)
        del added, remake, dfound, dnormed, grad, finish
        doutput = self._output_backward(dadded, outputs, weights, 0, grads)
        del outputs
        dmixed, finish_output = self._output.backward(doutput, weights, grads, wants=wants)
        finish_output(mixed.flatten(1))
        dmixed = dmixed.unflatten(1, (self.heads, self.channels))
        del doutput, finish_output
        rotary, prepared = self.rotary(weights, call.cos, call.sin), self.rotary_input.forward(qkv, weights)
        parts = call.attention.backward(dmixed, *rotate_expanded(prepared, rotary), mixed, sums)
        del dmixed, mixed, sums
        dqkv, *of_norms = rotate_backward(prepared, rotary, *parts)
        del prepared, parts
        grads.update(zip(self._norms, of_norms, strict=False))
        dqkv, more = self.rotary_input.backward(qkv, dqkv, weights)
        grads.update(more)
        del qkv

        dnormed, finish_qkv = self._qkv.backward(dqkv, weights, grads, wants=wants)
        return self._add_backward(x, dnormed, dadded, weights, 0, grads, finish_qkv), grads

    def _after_attention(self, x: Tensor, mixed: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        """What is saved as `mlp_norm`."""
        output = self._project_back(mixed, weights)
        added, normed = self._add_attention(x, output, weights)
        return (added, output, self.mlp.forward(normed, weights, Dropped())) if self._post_norms else (added,)

    def _output_backward(
        self, grad: Tensor, outputs: Sequence[Tensor], weights: Weights, number: int, grads: Grads
    ) -> Tensor:
        """The gradient of the output of attention (0) or MLP (1), for that of what it adds to the residual stream."""
        if not self._post_norms:
            return self._scaled(grad)
        name = self._post_norms[number]
        found, grads[name], _ = norm_backward(outputs[number], weights[name], self._norm, grad, None)
        return found

    def _remade(self, added: Tensor, weights: Weights) -> Tensor:
        """What the MLP is given of the residual stream."""
        return self._add(added, None, weights, 1)[1]

    def _add_backward(
        self,
        x: Tensor,
        grad: Tensor,
        residual: Tensor,
        weights: Weights,
        number: int,
        grads: Grads,
        finish: Callable[[Tensor], None],
    ) -> Tensor:
        """The gradient of the residual stream x, for that of what attention (0) or MLP (1) is given of it. `finish` is
        called with what that is, which the norm's kernel recomputes."""
        if not self._pre_norms:
            finish(x)
            return grad + residual
        name = self._pre_norms[number]
        dx, grads[name], normed = norm_backward(x, weights[name], self._norm, grad, residual, remakes=True)
        assert normed is not None
        finish(normed)
        return dx


class _Block(torch.autograd.Function):
    """The autograd node of a block."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, block: FusedBlock, call: Call, *weights: Tensor) -> Tensor:
        ctx.block, ctx.call, ctx.weights = block, call, weights
        return block.forward(hidden.detach()[0], dict(zip(block.names, weights, strict=True)), call, call.saved)[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        block, call, weights = ctx.block, ctx.call, ctx.weights
        if call is None:
            raise RuntimeError("a block's backward can run only once for each forward: what it saved is gone")
        ctx.call = ctx.weights = None
        block.needed(-1)
        by_name = {name: weight.detach() for name, weight in zip(block.names, weights, strict=True)}
        trained = zip(block.names, ctx.needs_input_grad[3:], strict=True)
        wants = any(needed for name, needed in trained if name not in block.adapter_names)
        dx, found = block.backward(grads[0][0].contiguous(), by_name, call, wants=wants)
        needed = zip(block.names, ctx.needs_input_grad[3:], strict=True)
        return dx[None], None, None, *(found.pop(name, None) if wanted else None for name, wanted in needed)


def norm_of(module: nn.Module, path: str, family: Family) -> Norm:
    """How the norm at this path computes."""
    found = part_of(module, path)
    return Norm(float(getattr(found, family.norm_epsilon)), family.norm_offset, family.norm_in_float32)


def rotary_factor(config: Any) -> float:
    """The fraction of a head's channels that are rotated, by the config of a family in which it may be less than 1."""
    return float((getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor") or 1.0)


def _place(block: nn.Module, path: str) -> tuple[nn.Module, str]:
    owner, _, name = path.rpartition(".")
    return block.get_submodule(owner), name
