"""Replaces the forwards of a model's blocks by fused ones (fused_block.py), where the model's family and its modules
are what those compute.

A block's own forward still runs wherever it is called with anything but packed tokens: by transformers' `generate`, by
another attention, in the checks of probe.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ebbtide.config.memory import ActivationName
from ebbtide.memory.device_budget import release_cache
from ebbtide.model.attention_kind import AttentionKind
from ebbtide.model.block_functions import Activation
from ebbtide.model.families import FAMILIES, Family, family_of, part_of
from ebbtide.model.joined_weights import join, pack
from ebbtide.model.load import decoder, layers_of
from ebbtide.model.lora import adapted_layers
from ebbtide.model.quantized_layers import SCALE
from ebbtide.parallel.dtensor import is_sharded
from ebbtide.policy.attention import PACKED
from ebbtide.policy.fused_block import Call, FusedBlock, FusedMLP, norm_of
from ebbtide.policy.fused_experts import Experts
from ebbtide.policy.fused_mlp import FusedGatedMLP
from ebbtide.policy.fused_norm import FusedNorm
from ebbtide.policy.packed_attention import PackedAttention, has_flash
from ebbtide.policy.saved_activations import Saved
from ebbtide.system.transformers_internals import attention_implementation, is_gelu_tanh, is_silu

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ebbtide.policy.fused_activations import FusedActivations


DEVICES = ("cuda",)
"""Where blocks are fused. On a CPU transformers' own run, with the bits that they have always had."""


class KeptActivations:
    """Everything that a block's forward saves stays on the device."""

    def __init__(self) -> None:
        self._tensors: dict[ActivationName, tuple[Tensor, ...]] = {}

    def put(self, name: ActivationName, *tensors: Tensor) -> None:
        self._tensors[name] = tensors

    def take(self, name: ActivationName) -> tuple[Tensor, ...] | None:
        return self._tensors.pop(name, None)


class FusedBlocks:
    """The fused blocks of a model. They are in use until `close`."""

    def __init__(self, model: PreTrainedModel) -> None:
        family = family_of(model)
        self.blocks = build_blocks(model)
        self.activations: FusedActivations | None = None
        """What decides about the activations of the forwards that follow; None keeps all."""
        self.exact = False
        """Whether attention has the bits of the paged engine's."""
        self._config, self._off = model.config, False
        for number, block in enumerate(self.blocks):
            block.module.forward = _Forward(self, number, block.module.forward)
        norm = part_of(decoder(model), family.last_norm)
        self._norm, self._own_norm = FusedNorm(norm, norm_of(decoder(model), family.last_norm, family)), norm.forward
        norm.forward = self._last_norm

    def join_weights(self, *, packs: bool) -> None:
        """Lets parameters that are multiplied with the same input follow each other in memory. `packs`: the frozen ones
        of each block are in one storage, so that they move as one, and the adapters of all blocks in another: where
        they stay among blocks that leave, what is left between them is too small for activations. Nothing has computed
        with them yet: what did would keep the memory that they leave."""
        for block in self.blocks:
            for parameters in block.joinable:
                if not any(is_sharded(parameter) for parameter in parameters):
                    join(parameters)
            if packs:
                _pack([one for one in block.module.parameters() if not one.requires_grad])
        device = next(self.blocks[0].module.parameters()).device
        if packs:
            release_cache(device)  # so that adapters begin no hole that a block left
            _pack([block.module.get_parameter(name) for block in self.blocks for name in block.adapter_names])
        release_cache(device)

    def runs(self, hidden: Tensor, named: dict[str, Any]) -> bool:
        """Whether a call of a block is one that the fused block computes."""
        return (
            not self._off
            and named.get("cu_seq_lens_q") is not None
            and named.get("past_key_values") is None
            and named.get("attention_mask") is None
            and len(hidden) == 1
            and attention_implementation(self._config) == PACKED
        )

    def _last_norm(self, hidden: Tensor) -> Tensor:
        if self._off or attention_implementation(self._config) != PACKED:
            found: Tensor = self._own_norm(hidden)
            return found
        return self._norm(hidden)

    def saved(self, number: int) -> Saved:
        """Where the forward of a block saves."""
        return KeptActivations() if self.activations is None else self.activations.begin(number)

    def close(self) -> None:
        """Gives the model its own forwards back."""
        for block in self.blocks:
            del block.module.forward
        del self._norm.module.forward

    @contextmanager
    def own_forwards(self) -> Iterator[None]:
        """Inside this context the model's own forwards run."""
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before


def _pack(parameters: Sequence[Tensor]) -> None:
    """Moves parameters into one storage; FSDP's stay in its own."""
    if parameters and not any(is_sharded(one) for one in parameters):
        pack(parameters)


class _Forward:
    """The forward of one block of a model."""

    def __init__(self, blocks: FusedBlocks, number: int, own: Any) -> None:
        self.blocks, self._number, self._own = blocks, number, own

    def __call__(self, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        if args or not self.blocks.runs(hidden_states, named):
            return self._own(hidden_states, *args, **named)
        block = self.blocks.blocks[self._number]
        cos, sin = (angles[0] for angles in named["position_embeddings"])
        cos, sin = block.rotary_input.angles(cos, sin, rotates=block.rotates)
        starts, longest = named["cu_seq_lens_q"], named["max_length_q"]
        attention = PackedAttention(starts, longest, block.scale, AttentionKind(block.window), self.blocks.exact)
        return block(hidden_states, Call(cos, sin, attention, self.blocks.saved(self._number)))


def fused_blocks_of(model: PreTrainedModel) -> FusedBlocks | None:
    """The fused blocks that are in use in a model."""
    forwards = (block.__dict__.get("forward") for block in layers_of(model) or ())
    return next((one.blocks for one in forwards if isinstance(one, _Forward)), None)


def own_forwards(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Inside this context the model's blocks run their own forwards, even if they are fused."""
    fused = fused_blocks_of(model)
    return nullcontext() if fused is None else fused.own_forwards()


def build_blocks(model: PreTrainedModel) -> list[FusedBlock]:
    """The fused computations of a model's blocks, which can be fused."""
    family = family_of(model)
    return [FusedBlock(block, family, _mlp(block, family)) for block in layers_of(model) or ()]


def why_not_fused(model: PreTrainedModel, weight: Tensor) -> str:
    """Why a model's blocks cannot be fused for training; empty if they can. `weight`: one of its weights, on the
    device."""
    if problem := why_not_computed(model):
        return problem
    channels = {part_of(block, family_of(model).attention).head_dim for block in layers_of(model) or ()}
    for count in channels:
        if not has_flash(weight.device, weight.dtype, count, count):
            kind = str(weight.dtype).removeprefix("torch.")
            return f"it has heads of {count} channels in {kind}, for which there is no flash attention"
    return ""


def why_not_computed(model: PreTrainedModel) -> str:
    """What a model has or lacks that fused blocks do not compute; empty if nothing."""
    config = model.config.get_text_config()
    family, inner, blocks = FAMILIES.get(config.model_type), decoder(model), layers_of(model)
    if family is None:
        return f"its family, {config.model_type}, is not one of {', '.join(FAMILIES)}"
    if not blocks or None in [part_of(inner, path) for path in (family.embedding, family.rotary, family.last_norm)]:
        return "it has no list of blocks, or no embedding, rotary embedding or norm around it"
    for number, block in enumerate(blocks):
        if problem := _problem(block, family):
            return f"its block {number} {problem}"
    return ""


def _problem(block: nn.Module, family: Family) -> str:
    """What a block has or lacks that fused blocks do not compute; empty if nothing."""
    adapters = {f"{path}.lora_{which}" for path, one in adapted_layers(block).items() for which in "AB"}
    names = {name for name, _ in block.named_parameters()} - adapters
    names = {name for name in names if name.rpartition(".")[2] != SCALE}
    attention, query_norm = part_of(block, family.attention), part_of(block, family.query_norm)
    mlp = {name for name in names if name.startswith(f"{family.mlp}.")}
    matrices = (family.query, family.key, family.value)
    optional = {f"{path}.weight" for path in (family.query_norm, family.key_norm)}
    optional |= {f"{path}.bias" for path in (*matrices, family.output)}
    if not names >= family.block_weights or names - mlp - family.block_weights - optional:
        return "has other weights than its family's"
    if len({f"{path}.bias" in names for path in matrices}) > 1:
        return "has biases on some of its queries, keys and values"
    channels = getattr(attention, "head_dim", 0)
    if not channels or channels % 2 or not hasattr(attention, "scaling"):
        return "has attention of another kind"
    if getattr(attention, "attn_logit_softcapping", None) is not None or not getattr(attention, "is_causal", True):
        return "has attention that is not causal, or caps its scores"
    if query_norm is not None and (query_norm.weight.numel() != channels) != family.qk_norm_over_heads:
        return "normalizes its queries over other channels than its family"
    if part_of(block, family.experts) is not None:
        wanted = {f"{family.router}.weight", f"{family.experts}.gate_up_proj", f"{family.experts}.down_proj"}
        activation = part_of(block, family.expert_activation)
    else:
        wanted = {f"{path}.weight" for path in family.mlp_matrices}
        activation = part_of(block, family.activation)
    if mlp != wanted:
        return "has an MLP with other weights than its family's"
    return "" if _activation(activation) else "has an activation function other than SiLU and GELU with tanh"


def _activation(module: nn.Module | None) -> Activation | None:
    if module is None:
        return None
    if is_silu(module):
        return "silu"
    return "gelu_tanh" if is_gelu_tanh(module) else None


def _mlp(block: nn.Module, family: Family) -> FusedMLP:
    if part_of(block, family.experts) is None:
        kind = _activation(part_of(block, family.activation))
        assert kind is not None
        return FusedGatedMLP(block, family, kind)
    kind, router = _activation(part_of(block, family.expert_activation)), part_of(block, family.router)
    assert kind is not None
    return Experts(family, kind, int(router.top_k), normalizes=bool(getattr(router, "norm_topk_prob", True)))


def saved_names(block: nn.Module) -> Sequence[ActivationName]:
    """The names under which a fused block saves something."""
    last: tuple[ActivationName, ...] = (
        ("mlp_act",) if part_of(block, family_of(block).experts) is None else ("moe_router", "moe_act")
    )
    return "block_input", "core_attn", "attn_proj", "mlp_norm", *last
