"""Kernels of layers with states in a trace: they do not run on the meta device.

Ours allocate there what they allocate on a GPU, and launch nothing; a plan for a CPU calls plain torch in their place.
Other packages' kernels have plain torch in their place, too, which saves more, but for gated delta nets where `fla` is
installed and there is no kernel of ours: its kernel saves its inputs, the normalized queries and keys, and a matrix for
each chunk of tokens, and computes the rest again in its backward. That is what the code of flash-linear-attention says;
no run was compared with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from inspect import unwrap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ebbtide.model.delta_rule import ChosenDeltaRule, can_use_fla, our_rule
from ebbtide.model.gated_delta_rule import has_kernels
from ebbtide.model.state_convolution import Convolution
from ebbtide.model.state_layers import state_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK = 64  # tokens of a chunk of that kernel


class _DeltaRule(torch.autograd.Function):
    """The memory of the gated delta rule's kernel."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        # [S, n, heads, channels]; decay and beta are [S, n, heads]
        normed = [torch.empty_like(query), torch.empty_like(key)]
        roots = [one.new_empty(one.shape[:-1], dtype=torch.float32) for one in normed]
        sums, chunks = torch.empty_like(decay, dtype=torch.float32), key.new_empty((*decay.shape, CHUNK))
        ctx.save_for_backward(*normed, *roots, value.contiguous(), sums, beta, chunks)
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        query, key, _, _, value, decay, beta, _ = ctx.saved_tensors
        wide = (*value.shape[:-1], key.shape[-1])  # keys for all value heads
        states = value.new_empty((*value.shape[:1], value.shape[1] // CHUNK + 1, *value.shape[2:], key.shape[-1]))
        again = [value.new_empty(wide), torch.empty_like(value), torch.empty_like(value), states]
        more = [torch.empty_like(value), torch.empty_like(states), value.new_empty(wide)]  # their gradients
        found = tuple(torch.empty_like(one) for one in (query, key, value, decay, beta))
        del again, more
        return found


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, output_final_state: bool = False, **_: Any
) -> tuple[Tensor, Tensor | None]:
    """(the outputs, the states after the last token if these are wanted)."""
    mixed: Tensor = _DeltaRule.apply(query, key, value, g, beta)  # type: ignore[no-untyped-call]
    size = (value.shape[0], *value.shape[2:], key.shape[-1])
    return mixed, value.new_empty(size, dtype=torch.float32) if output_final_state else None


def _rule_on_gpu(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> tuple[Tensor, Tensor | None]:
    ours = has_kernels(query, key, value) or not _can_use_fla()
    return (our_rule if ours else delta_rule)(query, key, value, **named)


@contextmanager
def traced_kernels(model: PreTrainedModel, device_type: str) -> Iterator[None]:
    """Inside this context, layers with states call no package's kernels. `device_type`: of the device that is planned
    for."""
    with ExitStack() as undo:
        for name in {type(layer.module).__module__ for layer in state_layers(model).layers}:
            code = sys.modules[name]
            for function, value in list(vars(code).items()):
                if (plain := _without_kernel(function, value, device_type)) is not None:
                    setattr(code, function, plain)
                    undo.callback(partial(setattr, code, function, value))
        yield


def _without_kernel(name: str, value: Any, device_type: str) -> Callable[..., Any] | None:
    """What a trace calls in place of a function of transformers' that may call a kernel; None if it is none."""
    if isinstance(value, ChosenDeltaRule):
        return _rule_on_gpu if device_type == "cuda" else partial(our_rule, plain=True)
    if isinstance(value, Convolution) and device_type == "cuda":
        return Convolution(unwrap(value))
    is_kernel = any(part in name for part in ("causal_conv1d", "chunk_scan", "recurrent"))
    # transformers wraps its own version of such functions.
    return unwrap(value) if callable(value) and hasattr(value, "__wrapped__") and is_kernel else None


def _can_use_fla() -> bool:
    """Whether the delta rule has its kernel here; without a GPU, whether it is installed."""
    if not torch.cuda.is_available():
        return find_spec("fla") is not None
    return can_use_fla(torch.device("cuda", torch.cuda.current_device()))
