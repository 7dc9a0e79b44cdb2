"""The experts of models whose blocks are not fused, on a GPU: transformers' grouped matmuls, between gathers whose
backward is a gather too. torch's own backward of a gather sorts the indices and adds rows up one after the other, which
takes longer than the experts' matmuls where a row is read thousands of times, as the bias of an expert is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ebbtide.model.block_functions import group
from ebbtide.model.linear import grouped_linear
from ebbtide.system.gpu import generation
from ebbtide.system.torch_internals import grouped_mm
from ebbtide.system.transformers_internals import grouped_experts, has_post_expert_norm, is_expert_parallel, set_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "ebbtide"  # of these experts among those that transformers knows


class _Gather(torch.autograd.Function):
    """Rows of x by index. `places` [len(x), n]: where each of them went; all went to as many places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return grads[0][places].sum(1), None, None


class _AddBias(torch.autograd.Function):
    """Adds the bias of its expert to each row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, experts: Tensor) -> Tensor:
        ctx.save_for_backward(experts)
        ctx.count = len(bias)
        return rows + bias[experts]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (experts,) = ctx.saved_tensors
        return grads[0], one_hot(experts, ctx.count).to(grads[0].dtype).t() @ grads[0], None


def mix_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What the chosen experts [T, visited] make of tokens [T, H], by their weights [T, visited]. `module`: one of
    transformers', with the matrices of all experts."""
    gather: Any = _Gather.apply
    order, places, ends = group(chosen, module.num_experts)
    experts = chosen.flatten()[order] if module.has_bias else None  # [N]: the expert of each row

    def project(rows: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)
        multiply = grouped_mm if module.is_transposed else grouped_linear
        found = multiply(rows.to(weight.dtype), weight, ends)
        if experts is None:
            return found
        added: Tensor = _AddBias.apply(found, getattr(module, f"{name}_bias"), experts)  # type: ignore[no-untyped-call]
        return added

    rows = gather(hidden, order // chosen.shape[1], places)
    rows = (
        module._apply_gate(project(rows, "gate_up_proj"))
        if module.has_gate
        else module.act_fn(project(rows, "up_proj"))
    )
    rows = project(rows, "down_proj")
    if has_post_expert_norm(module):
        rows = module.post_expert_norm(rows)
    rows = rows * gather(weights.reshape(-1, 1), order, places.view(-1, 1))
    visits: Tensor = gather(rows, places.flatten(), order[:, None])
    return visits.view(len(hidden), chosen.shape[1], -1).sum(1).to(hidden.dtype)


def _mix(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    if is_expert_parallel(module) or not groups_on_device(module.down_proj):
        return grouped_experts(module, hidden, chosen, weights)
    return mix_experts(module, hidden, chosen, weights)


def groups_on_device(weight: Tensor) -> bool:
    """Whether torch multiplies groups of rows with one matrix each without the host knowing how many there are: it has
    that for bfloat16 on these GPUs, and loops over experts on the host elsewhere."""
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return False
    return generation(weight.device) in (9, 10)


def use_fast_experts(model: PreTrainedModel) -> None:
    """Lets a model that computes its experts in groups do so by `mix_experts`, where the device can."""
    set_experts(model, NAME, _mix)
