"""Tensor parallelism by the plan that a model's own transformers config declares: matrices are cut by columns, then by rows, and one sum joins what comes out."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel, parallelize_module
from transformers import PreTrainedModel

from ebbtide.errors import UserError
from ebbtide.policy.model import decoder

STYLES: dict[str, type[ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": SequenceParallel,
}
WHOLE = {"embedding_rowwise"}  # of an embedding: the head reads the same matrix where they are tied, and its kernels want all of it
HEADS = 2  # of a tensor [batch, tokens, heads, channels]: norms of queries and keys see a part of the heads


def parallelize(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """In place: what the plan names becomes DTensors over the mesh; the rest is the same on all of its ranks."""
    plan = {path: way for path, way in (getattr(model.config, "base_model_tp_plan", None) or {}).items() if way not in WHOLE}
    name = type(model).__name__
    if not plan:
        raise UserError(f"`cluster.tensor: {mesh.size()}`: the config of {name} declares no `base_model_tp_plan`: set `cluster.tensor: 1`")
    if unknown := sorted(set(plan.values()) - STYLES.keys()):
        raise UserError(
            f"`cluster.tensor: {mesh.size()}`: {name} wants some modules cut as `{'`, `'.join(unknown)}`, which is not supported: set `cluster.tensor: 1` "
            "and share the model out with `cluster.data`"
        )
    config = model.config
    sizes = {what: getattr(config, what, None) for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size")}
    for what, size in sizes.items():
        if size is not None and size % mesh.size():
            raise UserError(
                f"`cluster.tensor: {mesh.size()}`: {name} has {what} = {size}, which is not a multiple of it: set a divisor of {size}"
            )
    parallelize_module(decoder(model), mesh, {path: _style(way) for path, way in plan.items()})


def _style(way: str) -> ParallelStyle:
    return SequenceParallel(sequence_dim=HEADS, use_local_output=True) if STYLES[way] is SequenceParallel else STYLES[way]()
