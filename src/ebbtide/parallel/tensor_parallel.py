"""Tensor parallelism by the plan that a model's transformers config declares, or else its family: matrices are sharded
by columns, then by rows, and one all-reduce sums the outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from ebbtide.errors import UserError
from ebbtide.model.families import FAMILIES
from ebbtide.model.load import decoder
from ebbtide.model.lora import adapted_layers
from ebbtide.parallel.dtensor import is_sharded

STYLES: dict[str, type[ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": SequenceParallel,
}
# The embedding stays whole: where it is tied, the head reads the same matrix, and its kernels need all of it.
NOT_SHARDED = {"embedding_rowwise"}
# The dimension of heads in [batch, tokens, heads, channels]: the norms of queries and keys get a rank's share of them.
HEADS_DIM = 2


def parallelize(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shards the model in place: what the plan names becomes DTensors over the mesh; the rest is replicated."""
    described = FAMILIES.get(model.config.get_text_config().model_type)
    declared = getattr(model.config, "base_model_tp_plan", None) or (described.tensor_plan if described else {})
    plan = {path: style for path, style in declared.items() if style not in NOT_SHARDED}
    name = type(model).__name__
    if not plan:
        raise UserError(
            f"`parallel.tensor: {mesh.size()}`: the config of {name} declares no `base_model_tp_plan`:"
            " set `parallel.tensor: 1`"
        )
    if unknown := sorted(set(plan.values()) - STYLES.keys()):
        raise UserError(
            f"`parallel.tensor: {mesh.size()}`: {name} declares modules sharded as `{'`, `'.join(unknown)}`,"
            " which is not supported: set `parallel.tensor: 1` and shard the model with `parallel.data`"
        )
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(model.config, key, None)
        if size is not None and size % mesh.size():
            raise UserError(
                f"`parallel.tensor: {mesh.size()}`: {name} has {key} = {size}, which is not a multiple of it:"
                f" set a divisor of {size}"
            )
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    with _adapters_apart(model, mesh):
        parallelize_module(decoder(model), mesh, {path: _style(style) for path, style in plan.items()})
    for name, parameter in model.named_parameters():  # A replicated one would now be trained, whatever it was before.
        parameter.requires_grad_(name not in frozen)


@contextmanager
def _adapters_apart(model: PreTrainedModel, mesh: DeviceMesh) -> Iterator[None]:
    """Inside this context layers have no adapters, whose matrices torch would shard like a weight. At the end they are
    sharded by what they have of the weight's sharded dimension: by columns, B's rows; by rows, A's columns. The other
    matrix is replicated, and FSDP adds up the ranks' parts of its gradient."""
    apart = [(layer, layer.lora_A, layer.lora_B) for layer in adapted_layers(model).values()]
    for layer, *_ in apart:
        del layer.lora_A, layer.lora_B
    yield
    for layer, first, second in apart:
        places: dict[int, tuple[Placement, Placement]] = {0: (Replicate(), Shard(0)), 1: (Shard(1), Replicate())}
        if is_sharded(layer.weight):
            (cut,) = layer.weight.placements
            assert isinstance(cut, Shard)
            first, second = (
                nn.Parameter(distribute_tensor(factor.detach(), mesh, [placed]))
                for factor, placed in zip((first, second), places[cut.dim], strict=True)
            )
        layer.lora_A, layer.lora_B = first, second


def _style(name: str) -> ParallelStyle:
    if STYLES[name] is SequenceParallel:
        return SequenceParallel(sequence_dim=HEADS_DIM, use_local_output=True)
    return STYLES[name]()
