"""A model shared out among ranks: matrices by tensor parallelism, then everything by FSDP2. What each has of a parameter is a DTensor's local part."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ebbtide.cluster.tensor import parallelize
from ebbtide.errors import UserError
from ebbtide.policy.model import decoder
from ebbtide.policy.policy import Policy


def shard(policy: Policy, mesh: DeviceMesh, device: torch.device) -> None:
    """In place, block by block; moves what stays on each rank to its device."""
    if policy.config.optimizer.grad_dtype == "float32" and policy.model.dtype != torch.float32:
        raise UserError(
            f"`optimizer.grad_dtype: float32` with `cluster` and weights in {str(policy.model.dtype).removeprefix('torch.')}: FSDP2 adds gradients up over ranks in "
            "float32, and over micro-batches in the weights' type: set it to `auto`, and raise `train.microbatch_tokens` to have fewer of those"
        )
    if mesh["tensor"].size() > 1:
        parallelize(policy.model, mesh["tensor"])
    layers = getattr(decoder(policy.model), "layers", None)
    data = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
    # Also over one data-parallel rank: then it copies weights instead of gathering them, and adds up the gradients of what tensor parallelism left whole.
    # The module from tokens to log-probs is the root, not the model: it uses the head's matrix as well, outside of any forward of the model's own.
    reduce = torch.float32 if data.size() > 1 else None  # over one rank nothing is added up
    for module in (*(layers if isinstance(layers, nn.ModuleList) else ()), policy.module):
        fully_shard(module, mesh=data, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce))
        assert isinstance(module, FSDPModule)
        if data.size() > 1:  # by one rank FSDP would divide them all the same
            # The loss's weights are of the whole step, so gradients are summed over ranks, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if data.size() == 1:
        _on_one_stream(policy.module)
    policy.module.to(device)
    policy.device = device


def _on_one_stream(root: nn.Module) -> None:
    """FSDP works on the stream that computes, not on others of its own: where nothing is sent there is nothing to do meanwhile. Once kernels have run on four more
    streams, an H200 takes 5% longer for every graph of decoding, also for those captured later, until the process ends."""
    assert isinstance(root, FSDPModule)
    context = root._get_fsdp_state()._comm_ctx
    begin = context.lazy_init

    def begin_on_one(device: torch.device) -> None:
        begin(device)
        stream = torch.get_device_module(device).current_stream(device)
        for name in ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce"):
            setattr(context, f"{name}_stream", stream)

    context.lazy_init = begin_on_one  # type: ignore[method-assign]
