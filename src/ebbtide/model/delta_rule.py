"""Which function computes the gated delta rule of Qwen3.5, Qwen3-Next and OLMo hybrid for chunks of tokens, in place of
transformers' own, which keeps some 20 tensors for the backward: that of gated_delta_rule.py, by its kernels or in plain
torch, or where it has no kernels, that of flash-linear-attention (`fla`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from ebbtide.model.gated_delta_rule import gated_delta_rule, has_kernels
from ebbtide.system.gpu import HOPPER, generation
from ebbtide.system.transformers_internals import DELTA_RULE, replace_state_function, state_function

RIGHT_SINCE = "3.7.1"
"""The version of Triton since which fla's gradients are right on Hopper GPUs. Below, the compiler breaks a kernel that
fla refuses to run (its issue 640) unless it finds tilelang, with which it has another."""


def our_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    plain: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """`gated_delta_rule`, called as transformers calls its own."""
    how = {"normalizes": use_qk_l2norm_in_kernel, "plain": plain}
    output, state = gated_delta_rule(query, key, value, g, beta, initial_state, **how)
    return output, state if output_final_state else None


class ChosenDeltaRule:
    """`our_rule`, or fla where that has kernels and ours has none."""

    def __init__(self, own: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
        """`own`: transformers' function, which calls the kernel if it is installed."""
        self._own = self.__wrapped__ = own

    def __call__(self, query: Tensor, *inputs: Tensor, **named: Any) -> tuple[Tensor, Tensor | None]:
        ours = has_kernels(query, *inputs[:2]) or not can_use_fla(query.device)
        return (our_rule if ours else self._own)(query, *inputs, **named)


def choose_delta_rule(module: nn.Module) -> None:
    """Replaces the delta rule of a layer, and of all others of its class, if it has one."""
    own = state_function(module, DELTA_RULE)
    if own is not None and not isinstance(own, ChosenDeltaRule):
        replace_state_function(module, DELTA_RULE, ChosenDeltaRule(own))


@cache  # Every call of a layer asks, and to find a package's version takes almost a millisecond.
def can_use_fla(device: torch.device) -> bool:
    """Whether fla is installed and computes right gradients on this device."""
    return device.type == "cuda" and find_spec("fla") is not None and not has_wrong_gradients(device)


def has_wrong_gradients(device: torch.device) -> bool:
    """Whether fla cannot compute gradients on this GPU."""
    if generation(device) != HOPPER or find_spec("tilelang") is not None:
        return False
    return "3.4" <= TorchVersion(version("triton")) < RIGHT_SINCE
