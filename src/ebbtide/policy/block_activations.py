"""The names of what a transformer block saves for its backward, which of them are offloaded or recomputed, and the
scope that a block's forward is in.

A name (`memory.activations`) stands for the tensors that some modules of the block save. Where blocks are not alike, or
have other modules than usual, only whole blocks have names (whole_blocks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor, nn

from ebbtide.config.memory import ActivationName
from ebbtide.model.families import family_of, part_of
from ebbtide.model.quantized_layers import layer_columns
from ebbtide.parallel.dtensor import unsharded
from ebbtide.policy.recompute import GatedMLP, RecomputingCall

NAMES: tuple[ActivationName, ...] = get_args(ActivationName)


def have_named_modules(blocks: Sequence[nn.Module]) -> bool:
    """Whether blocks are alike and have the modules that their family says, so that these can be named."""
    family = family_of(blocks[0])
    shapes = [{name for name, _ in block.named_parameters()} for block in blocks]
    alike = all(shape == shapes[0] for shape in shapes)
    return alike and shapes[0] >= family.block_weights and part_of(blocks[0], family.mlp) is not None


def activation_names(block: nn.Module) -> list[ActivationName]:
    """The names that a block has."""
    inside = {path for path, _ in block.named_modules()}
    found = {name for path, name in scopes_of(block).items() if path in inside}
    if family_of(block).experts in inside:
        found.add("expert_fc1")
    return [name for name in NAMES if name in found or name == "block_input"]


def locally_recomputable(block: nn.Module) -> frozenset[ActivationName]:
    """The names that can be recomputed inside one module of this block, from little more than is saved anyway: norms
    (also of queries and keys), and the elementwise product in a gated MLP."""
    family, gated = family_of(block), gated_mlp_of(block)
    found = {family.norms[path] for path in norms_of(block)}
    if gated is not None:
        norm = next(iter(norms_of(block).values())).get_parameter("weight")
        columns = layer_columns(gated.gate)
        probe = torch.linspace(-1, 1, 4 * columns, dtype=norm.dtype, device=norm.device).view(1, 4, -1)
        with torch.no_grad(), unsharded(block):
            if torch.equal(gated(probe), block.get_submodule(family.mlp)(probe)):
                found.add("mlp_fc2")
    return frozenset(found)


def norms_of(block: nn.Module) -> dict[str, nn.Module]:
    """The norms of this block, by path."""
    norms = family_of(block).norms
    return {path: module for path, module in block.named_modules() if path in norms}


def scopes_of(block: nn.Module) -> dict[str, ActivationName]:
    """Submodule of this block -> the name of what it saves."""
    family = family_of(block)
    return family.scopes(sparse=part_of(block, family.experts) is not None)


def gated_mlp_of(block: nn.Module) -> GatedMLP | None:
    """The parts of this block's MLP; None if it has others than those of a gated one."""
    family = family_of(block)
    parts = [part_of(block, path) for path in (family.gate, family.up, family.activation, family.down)]
    return None if None in parts or family.has_packed_mlp else GatedMLP(*parts)


def residual_width(block: nn.Module) -> int:
    """Channels of the residual stream."""
    weight = block.get_submodule(family_of(block).stream_norms[0]).weight
    assert isinstance(weight, Tensor)
    return len(weight)


@dataclass(frozen=True)
class ActivationChoice:
    """Which names are offloaded and which are recomputed; all others are kept."""

    offload: frozenset[ActivationName] = frozenset()
    recompute: frozenset[ActivationName] = frozenset()
    local: frozenset[ActivationName] = frozenset()
    """The names that can be recomputed inside one module."""
    recompute_blocks: int | None = None
    """How many of the first blocks recompute; None is all."""

    def of_block(self, number: int, *, offloads: bool) -> ActivationChoice:
        """The choice for one block; `offloads`: whether it is one that may offload."""
        recomputes = self.recompute_blocks is None or number < self.recompute_blocks
        return ActivationChoice(
            self.offload if offloads else frozenset(), self.recompute if recomputes else frozenset(), self.local
        )

    @property
    def recomputes_whole_block(self) -> bool:
        """Whether the whole block is recomputed, because more is to be recomputed than single modules can."""
        return bool(self.recompute - self.local)

    def retains(self, name: ActivationName) -> bool:
        """Whether the tensors of this name are kept or offloaded."""
        return name not in self.recompute


@dataclass
class BlockState:
    """One block, and the scope that its forward is in at the moment."""

    number: int
    module: nn.Module
    choice: ActivationChoice
    scopes: dict[str, ActivationName]
    """Submodule -> the name of what it saves."""
    hidden: int
    """Channels of the residual stream."""
    keeps_only_input: bool
    """Whether all of the block is recomputed from its input."""
    outermost: ActivationName | None = None
    """The scope of what no named module saves."""
    recomputes_norms: bool = False
    """Whether its norms can be recomputed by `NormCall`."""
    wrapped: bool = False
    """Whether the forwards of its submodules are wrapped."""
    call: RecomputingCall | None = None
    """The call of the running module, if that module recomputes what it saves."""
    stack: list[ActivationName] = field(default_factory=list)
    """The scopes that the forward is in, the innermost last."""
    outside: set[int] = field(default_factory=set)
    """Addresses of storages from outside the block: positions, masks, gathered weights."""

    def end_call(self) -> None:
        """Ends the call of a module that recomputes what it saves, if one is running."""
        if self.call is not None:
            self.call.end_forward()
            self.call = None

    @property
    def scope(self) -> ActivationName | None:
        """The name whose module runs; None if what it saves has none."""
        return self.stack[-1] if self.stack else self.outermost

    def name(self, tensor: Tensor) -> ActivationName | None:
        """The name of a tensor that is being saved."""
        if self.scope == "moe_act" and tensor.shape[-1:] == (self.hidden,):
            return "expert_fc1"
        if self.scope == "attn_norm" and "attn_norm" in self.choice.recompute:
            return "block_input"  # A norm that is recomputed saves nothing but its input.
        return self.scope
