"""What an RMS norm saves, made again from its input by two elementwise operations instead of the whole norm.

transformers' norms save their input in fp32 and the normed input in the weights' type: 12 bytes a number where the input has 2. Both follow from the
input and the reciprocal root (one number a token), by a conversion and one product: the same operations on the same numbers, so the same bits.
Whether a model's norm is of this kind is found out by trying it, not by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def again(x: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
    """A norm's input in fp32, and normed: the reference for norm_kernels.py, and the way on a CPU."""
    wide = x.float()
    return wide, torch.mul(wide, roots, out=torch.empty_like(x))  # rounded as it is written


class NormCall:
    """One call of a norm: holds its input, and makes again what it saved."""

    def __init__(self, x: Tensor, saved: Any, load: Callable[[Any], Tensor]) -> None:
        self._shape, self._saved, self._load = x.shape, saved, load
        self._root: Tensor | None = None
        self._made: tuple[Tensor, Tensor] | None = None
        self._users = 0

    def pack(self, tensor: Tensor) -> Tensor | Again:
        if tensor.shape == (*self._shape[:-1], 1):
            self._root = tensor
            return tensor
        if tensor.shape != self._shape or (tensor.dtype != torch.float32 and self._root is None):
            return tensor  # without the root, as where the input needs no gradient, it stays
        self._users += 1
        return Again(self, normed=tensor.dtype != torch.float32)

    def again(self, normed: bool) -> Tensor:
        if self._made is None:
            assert self._root is not None
            self._made = _made(self._load(self._saved), self._root)
        self._users -= 1
        found = self._made[normed]
        if self._users == 0:
            self._made = self._saved = None
        return found


def _made(x: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
    if x.device.type != "cuda":
        return again(x, roots)
    from ebbtide.policy import norm_kernels

    return norm_kernels.again(x, roots)


class Again:
    """A saved tensor that is not there."""

    def __init__(self, call: NormCall, normed: bool) -> None:
        self._call, self._normed = call, normed

    def make(self) -> Tensor:
        return self._call.again(self._normed)


def follows(norm: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether all that a norm saves is what `NormCall` makes again, to the bit."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    x = torch.linspace(-3, 5, 6 * len(weight), device=device).to(dtype).view(1, 6, -1).requires_grad_()
    if dtype == torch.float32:
        return False  # it saves its input as it is, and little more
    found: list[tuple[Tensor, Tensor | Again]] = []
    call = NormCall(x.detach(), x.detach(), lambda saved: saved)

    def pack(tensor: Tensor) -> Tensor:
        found.append((tensor.detach(), call.pack(tensor.detach())))
        return tensor.detach()

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x)
    made = [(tensor, again.make()) for tensor, again in found if isinstance(again, Again)]
    return bool(made) and all(tensor.dtype == again.dtype and torch.equal(tensor, again) for tensor, again in made)
