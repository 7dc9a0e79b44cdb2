"""Tensor parallelism by the plan that a model's transformers config declares, or else its family: matrices are sharded
by columns, then by rows, and one all-reduce sums the outputs."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
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
    parallelize_module(decoder(model), mesh, {path: _style(style) for path, style in plan.items()})


def _style(name: str) -> ParallelStyle:
    if STYLES[name] is SequenceParallel:
        return SequenceParallel(sequence_dim=HEADS_DIM, use_local_output=True)
    return STYLES[name]()
