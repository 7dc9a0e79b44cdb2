"""The gated delta rule of Qwen3.5, Qwen3-Next and OLMo hybrid in training.

transformers computes it in chunks of tokens, with a kernel of flash-linear-attention or in plain torch. The plain one
would keep some 20 tensors of float32 for the backward pass, several times what the rest of a layer keeps: here it keeps
its inputs alone, and the backward pass computes the others again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from ebbtide.system.transformers_internals import delta_rule, replace_delta_rule

RIGHT_SINCE = "3.7.1"
"""The version of Triton since which fla's gradients are right on Hopper GPUs. Below, the compiler breaks a kernel that
fla refuses to run (its issue 640) unless it finds tilelang, with which it has another."""

DeltaRule = Callable[..., tuple[Tensor, Tensor | None]]


class LeanDeltaRule:
    """The delta rule of a family's layers, in place of transformers' function."""

    def __init__(self, own: DeltaRule, plain: DeltaRule) -> None:
        self._own, self._plain = own, plain
        self.__wrapped__ = plain

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        if has_kernels() and not has_wrong_gradients(query.device):
            return self._own(query, key, value, g=g, beta=beta, **named)
        inputs = query, key, value, g, beta
        if torch.is_grad_enabled() and any(one.requires_grad for one in inputs) and not named.get("output_final_state"):
            output: Tensor = _Recomputed.apply(self._plain, named, *inputs)  # type: ignore[no-untyped-call]
            return output, None
        return self._plain(query, key, value, g=g, beta=beta, **named)


class _Recomputed(torch.autograd.Function):
    """The plain rule's output, which keeps nothing but the inputs."""

    @staticmethod
    def forward(ctx: Any, rule: DeltaRule, named: dict[str, Any], *inputs: Tensor) -> Tensor:
        ctx.rule, ctx.named = rule, named
        ctx.save_for_backward(*inputs)
        return _output(rule, named, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs = [one.detach().requires_grad_() for one in ctx.saved_tensors]
        with torch.enable_grad():
            output = _output(ctx.rule, ctx.named, inputs)
        return None, None, *torch.autograd.grad(output, inputs, grads)


def _output(rule: DeltaRule, named: dict[str, Any], inputs: Any) -> Tensor:
    query, key, value, g, beta = inputs
    return rule(query, key, value, g=g, beta=beta, **named)[0]


def make_lean(module: nn.Module) -> None:
    """Lets a layer, and all others of its family, keep little of the delta rule, if it has one."""
    own = delta_rule(module)
    if own is not None and not isinstance(own.function, LeanDeltaRule):
        replace_delta_rule(module, LeanDeltaRule(own.function, own.plain))


@cache
def has_kernels() -> bool:
    return find_spec("fla") is not None


@cache  # Every call of a layer asks, and to find a package's version takes almost a millisecond.
def has_wrong_gradients(device: torch.device) -> bool:
    """Whether fla cannot compute gradients on this device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9 or find_spec("tilelang") is not None:
        return False
    return "3.4" <= TorchVersion(version("triton")) < RIGHT_SINCE
