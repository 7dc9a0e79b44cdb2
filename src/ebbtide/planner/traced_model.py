"""The shape of a model of any family that transformers has, from its config.json: its parameters are those of
transformers' own class on the meta device, its KV cache is what its layers write, and its activations are traced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ebbtide.config.model import ModelConfig
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.model.load import blocks_of, layers_of
from ebbtide.model.shape import LoraShape, Tensor
from ebbtide.model.traced_shape import TracedShape
from ebbtide.planner.host_memory import meta_model
from ebbtide.planner.trace import Tracer
from ebbtide.planner.traced_kernels import traced_kernels
from ebbtide.policy.activation_costs import PROBE_TOKENS, probe_length
from ebbtide.policy.attention_calls import record_calls
from ebbtide.policy.block_activations import have_named_modules
from ebbtide.policy.fused_norm import fuse_norms
from ebbtide.rollout.paged.attention import layout_of, model_cache_costs
from ebbtide.rollout.paged.state_memory import StateMemory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOT_TRACED = (NotImplementedError, RuntimeError, TypeError, ValueError, AttributeError, LookupError)
"""What transformers' code raises where it needs numbers, which tensors on the meta device do not have."""


def trace_shape(config: Config, device_type: str) -> TracedShape:
    """Traces the configured model, on sequences as long as the run's."""
    model, tokens = config.model, min(PROBE_TOKENS, config.train.microbatch_tokens)
    if model.base is not None:
        raise UserError(
            f"`model.path: {model.path}` is of a family whose blocks no formula describes, and a plan of it with"
            f" `model.base: {model.base}` is not possible: remove `model.base`"
        )
    itemsize = model.itemsize(device_type)
    built = meta_model(config, {2: torch.bfloat16, 4: torch.float32}[itemsize]).eval()
    if device_type == "cuda":
        fuse_norms(built)
    return shape_of_model(built, config, probe_length(tokens, config.max_sequence_tokens), itemsize, device_type)


def shape_of_model(
    built: PreTrainedModel, config: Config, length: int, itemsize: int, device_type: str = "cuda"
) -> TracedShape:
    """The shape of a model on the meta device, on sequences of so many tokens, for a device of this type."""
    model = config.model
    text: Any = built.config.get_text_config()
    family, blocks = str(text.model_type), blocks_of(built)
    tied = built.get_output_embeddings().weight is built.get_input_embeddings().weight
    named, listed = list(built.named_parameters()), layers_of(built)
    assert listed is not None  # It has blocks.
    try:
        with traced_kernels(built, device_type):
            calls, states = record_calls(built), StateMemory(built).slot_bytes
            if config.generates and config.rollout.engine == "paged":
                layout_of(calls, built.config)  # It refuses what the engine cannot run.
            shares_keys = any(call.source != call.layer for call in calls)
            trace = Tracer(built, listed, length, shares_keys=shares_keys).trace()
    except NOT_TRACED as error:
        raise UserError(
            f"`model.path: {model.path}` is of the family `{family}`, which cannot be planned: a trace of it fails"
            f" ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error
    costs = model_cache_costs(built.config)
    embedding, inside = built.get_input_embeddings().weight, {id(one) for block in blocks for one in block.parameters()}
    outside = [(name, one) for name, one in named if id(one) not in inside]
    first = [one for name, one in outside if "embed" in name or one is embedding]
    return TracedShape(
        family=family,
        layers=len(blocks),
        hidden=int(embedding.shape[1]),
        heads=1,
        kv_heads=1,
        head_dim=costs.queries,
        mlp=costs.mlp,
        vocabulary=int(embedding.shape[0]),
        tied=tied,
        experts=_experts(blocks),
        context=getattr(text, "max_position_embeddings", None),
        lora=_lora(model),
        itemsize=itemsize,
        blocks=tuple(_tensors(block, trained=model.lora is None) for block in blocks),
        before=tuple(_rows(one) for one in first),
        after=tuple(_rows(one) for _, one in outside if all(one is not other for other in first)),
        block_adapters=tuple(_tensors(block, trained=True) for block in blocks) if model.lora is not None else (),
        kv_layers=tuple((call.heads, *call.channels) for call in calls if call.source == call.layer),
        state_bytes=states,
        attention=trace.attention,
        forward=trace.forward,
        in_forward=trace.in_forward,
        keep=trace.keep,
        recompute=trace.recompute,
        inputs=trace.inputs,
        has_named_modules=have_named_modules(blocks),
    )


def _lora(model: ModelConfig) -> LoraShape | None:
    if (lora := model.lora) is None:
        return None
    return LoraShape(lora.rank, frozenset(lora.targets) if lora.targets is not None else None, frozenset(lora.exclude))


def _rows(tensor: torch.Tensor) -> Tensor:
    rows = tensor.shape[0] if tensor.ndim else 1
    return rows, tensor.numel() // rows


def _tensors(block: nn.Module, *, trained: bool) -> tuple[Tensor, ...]:
    """The parameters of a block that are trained, or frozen."""
    return tuple(_rows(one) for one in block.parameters() if one.requires_grad is trained)


def _experts(blocks: list[nn.Module]) -> int:
    """The number of experts: of the matrices of which a parameter has several. A convolution's is one."""
    found = [
        parameter.shape[0]
        for block in blocks
        for module in block.modules()
        if not isinstance(module, nn.Conv1d)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 3
    ]
    return max(found, default=0)
