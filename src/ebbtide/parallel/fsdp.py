"""Shards a model among ranks: matrices by tensor parallelism, then everything by FSDP2. A parameter becomes a DTensor,
and each rank has its local part."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from ebbtide.model.load import layers_of
from ebbtide.parallel.dtensor import local
from ebbtide.parallel.tensor_parallel import parallelize
from ebbtide.system.torch_internals import fsdp_on_one_stream


def shard_model(model: PreTrainedModel, root: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Shards the model in place, block by block, and moves each rank's shards to its device. `root` is the module from
    tokens to log-probs: it also uses the head's matrix, outside of the model's own forward."""
    if mesh["tensor"].size() > 1:
        parallelize(model, mesh["tensor"])
    data = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
    # FSDP is used also over one data-parallel rank: then it copies weights instead of gathering them, and reduces the
    # gradients of what tensor parallelism left replicated.
    reduce = torch.float32 if data.size() > 1 else None  # over one rank nothing is reduced
    for module in (*(layers_of(model) or ()), root):
        fully_shard(module, mesh=data, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce))
        assert isinstance(module, FSDPModule)
        if data.size() > 1:  # over one rank the sum is the average
            # The loss's weights are those of the whole step, so gradients are summed over ranks, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if data.size() == 1:
        # Where nothing is sent there is nothing to overlap. Once kernels have run on FSDP's four streams, an H200 takes
        # 5% longer for every CUDA graph of decode, also for those captured later, until the process ends.
        assert isinstance(root, FSDPModule)
        fsdp_on_one_stream(root)
    root.to(device)


def gathered_bytes(model: PreTrainedModel, mesh: DeviceMesh) -> int:
    """The bytes of weights that FSDP gathers in a forward or backward of a sharded model: those outside the blocks, the
    block in use and, unless a rank has all of it, the next one. Gradients are whole as well until they are reduced."""
    shards = mesh["shard"].size()

    def whole(module: nn.Module) -> int:
        return shards * sum(local(parameter).nbytes for parameter in module.parameters())

    blocks = [whole(block) for block in layers_of(model) or ()]
    at_once = max(blocks, default=0) * (2 if shards > 1 else 1)
    return whole(model) - sum(blocks) + at_once
