"""Norms as one autograd function each, which saves its input alone: the one after the last of the fused blocks, and all
norms of models whose blocks are not fused.

transformers' norms are some ten kernels, and save their input in float32 and what they multiply with their weight. What
one computes is found out by trying it, not by its name.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ebbtide.model.block_functions import Norm, add_norm, gated_norm, gated_norm_backward, norm_backward
from ebbtide.model.load import decoder, layers_of
from ebbtide.policy.block_activations import have_named_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EPSILONS = ("eps", "variance_epsilon", "epsilon")
"""The names of it in transformers' norms."""


class FusedNorm:
    """A norm of hidden states [..., W]."""

    def __init__(self, module: nn.Module, norm: Norm) -> None:
        self.module, self._norm = module, norm

    def __call__(self, hidden: Tensor) -> Tensor:
        found: Tensor = _Norm.apply(hidden, self.module.weight, self._norm)  # type: ignore[no-untyped-call]
        return found


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, norm: Norm) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.norm = norm
        if hidden.is_meta:  # a plan's trace, of what the kernel will make
            return torch.empty_like(hidden)
        return add_norm(hidden.flatten(0, -2), None, weight, norm)[1].view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        if hidden.is_meta:
            return torch.empty_like(hidden), torch.empty_like(weight), None
        flat = hidden.flatten(0, -2)
        dx, dweight, _ = norm_backward(flat, weight, ctx.norm, grads[0].contiguous().view_as(flat), None)
        return dx.view_as(hidden), dweight if ctx.needs_input_grad[1] else None, None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gate: Tensor, weight: Tensor, norm: Norm) -> Tensor:
        ctx.save_for_backward(hidden, gate, weight)
        ctx.norm = norm
        if hidden.is_meta:
            return torch.empty_like(hidden)
        return gated_norm(hidden.flatten(0, -2), gate.flatten(0, -2), weight, norm).view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, gate, weight = ctx.saved_tensors
        if hidden.is_meta:
            return torch.empty_like(hidden), torch.empty_like(gate), torch.empty_like(weight), None
        x, opened, above = (one.flatten(0, -2) for one in (hidden, gate, grads[0]))
        dx, dgate, dweight = gated_norm_backward(x, opened, weight, ctx.norm, above)
        return dx.view_as(hidden), dgate.view_as(gate), dweight if ctx.needs_input_grad[2] else None, None


def fuse_norms(model: PreTrainedModel) -> None:
    """Replaces the forwards of the norms of a model whose blocks are not fused, for where it runs on a GPU, or on the
    meta device for a plan of one. Where `memory.activations` knows a block's norms by name, they stay transformers':
    there it may recompute what these save."""
    blocks = layers_of(model)
    if not blocks or have_named_modules(list(blocks)):
        return
    known: dict[object, tuple[Norm | None, Norm | None]] = {}
    for module in decoder(model).modules():
        if (epsilon := _epsilon(module)) is None or isinstance(module.forward, _Forward):
            continue
        key = type(module), epsilon, module.get_parameter("weight").shape
        if key not in known:
            known[key] = norm_by_trying(module, epsilon), norm_by_trying(module, epsilon, gated=True)
        if any(known[key]):
            module.forward = _Forward(module, *known[key])


def _epsilon(module: nn.Module) -> float | None:
    """The epsilon of a module that has what a norm has, and nothing else."""
    names = [name for name, _ in module.named_parameters()]
    found = next((getattr(module, name) for name in EPSILONS if hasattr(module, name)), None)
    is_norm = names == ["weight"] and module.get_parameter("weight").ndim == 1
    return float(found) if is_norm and isinstance(found, float) else None


@torch.no_grad()
def norm_by_trying(module: nn.Module, epsilon: float, *, gated: bool = False) -> Norm | None:
    """What a module computes of hidden states, or of these and a gate, as a norm; None if it is none. A copy of it with
    other weights is tried on the CPU, with rows so small that epsilon counts, and has to give the same 16 bits."""
    width, made = module.get_parameter("weight").numel(), torch.Generator().manual_seed(0)
    x, gate, weight = (torch.randn(size, generator=made) for size in ((64, width), (64, width), (width,)))
    x, gate, weight = (x * torch.logspace(-5, 2, 64)[:, None]).bfloat16(), gate.bfloat16(), weight.bfloat16()
    tried = copy.copy(module)
    tried.__dict__ = {name: value for name, value in vars(module).items() if name != "forward"}
    tried._parameters = {**module._parameters, "weight": nn.Parameter(weight)}
    given = (x, gate) if gated else (x,)
    try:
        wanted = type(module).forward(tried, *given)  # without its hooks
    except (TypeError, AttributeError, RuntimeError, ValueError):  # It wants fewer tensors, or more, or other ones.
        return None
    for norm in (Norm(epsilon, offset, wide) for offset in (0.0, 1.0) for wide in (False, True)):
        found = gated_norm(x, gate, weight, norm) if gated else add_norm(x, None, weight, norm)[1]
        if isinstance(wanted, Tensor) and torch.equal(found, wanted):
            return norm
    return None


class _Forward:
    """The forward of one norm, in place of its own."""

    def __init__(self, module: nn.Module, norm: Norm | None, gated: Norm | None) -> None:
        """What it computes of hidden states, and of these and a gate; None if that is no norm."""
        self._own, self._module, self._norm, self._gated = module.forward, module, norm, gated

    def __call__(self, hidden: Tensor, *args: Any, **named: Any) -> Any:
        weight: Any = self._module.weight
        inputs = (hidden, *args)
        norm = {1: self._norm, 2: self._gated}.get(len(inputs))
        if norm is None or named or not _on_gpu(*inputs, weight):
            return self._own(hidden, *args, **named)
        return (_Norm if len(inputs) == 1 else _GatedNorm).apply(*inputs, weight, norm)  # type: ignore[no-untyped-call]


def _on_gpu(*tensors: Any) -> bool:
    """Whether all are plain tensors, which no rank shards, in the same 16 bits, on a GPU or in a plan for one."""
    return (
        all(
            type(one) in (Tensor, nn.Parameter) and one.dtype == tensors[0].dtype and (one.is_cuda or one.is_meta)
            for one in tensors
        )
        and tensors[0].is_floating_point()
        and tensors[0].itemsize == 2
    )
