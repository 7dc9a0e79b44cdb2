"""Saved tensors that are not there: one module's call makes them again from what it holds, in place of the whole block.

A norm in transformers saves its input in fp32 and the normed input in the weights' type: 12 bytes a number where the input has 2. Both follow from the
input and the reciprocal root (one number a token), by a conversion and one product. A gated MLP saves its activated half and the product of both halves:
both follow from the halves. The same operations on the same numbers, so the same bits. Whether a model's modules are of this kind is found out by trying
them, not by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Place = Callable[[Tensor], Any]
"""Where a tensor waits: it may be parked meanwhile."""
Load = Callable[[Any], Tensor]


class Call(Protocol):
    def pack(self, tensor: Tensor) -> Tensor | Again | None:
        """What is saved in place of a tensor; None where it is not this call's."""
        ...

    def again(self, which: int) -> Tensor: ...

    def over(self) -> None:
        """The forward of the module has ended."""
        ...


class Again:
    """A saved tensor that is not there: one of what a call makes again, or a view of it."""

    def __init__(self, call: Call, which: int, tensor: Tensor) -> None:
        self._call, self._which, self._size, self._stride = call, which, tensor.size(), tensor.stride()

    def make(self) -> Tensor:
        return self._call.again(self._which).as_strided(self._size, self._stride)


def norm_again(x: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
    """A norm's input in fp32, and normed: the reference for norm_kernels.py, and the way on a CPU."""
    wide = x.float()
    return wide, torch.mul(wide, roots, out=torch.empty_like(x))  # rounded as it is written


class NormCall:
    """One call of a norm: holds its input, and makes again what it saved."""

    WIDE, NORMED = 0, 1

    def __init__(self, x: Tensor, place: Place, load: Load) -> None:
        self._x: Tensor | None = x
        self._shape, self._place, self._load = x.shape, place, load
        self._saved: Any = None
        self._root: Tensor | None = None
        self._wide_at = 0  # where the input in fp32 lies
        self._made: tuple[Tensor, Tensor] | None = None
        self._users = 0

    def pack(self, tensor: Tensor) -> Tensor | Again:
        if tensor.shape == (*self._shape[:-1], 1):
            self._root = tensor
            return tensor
        if tensor.shape != self._shape or not tensor.is_contiguous():
            return tensor
        if tensor.dtype == torch.float32 and self._root is None:
            self._wide_at = tensor.data_ptr()
        elif self._root is None or (tensor.dtype == torch.float32 and tensor.data_ptr() != self._wide_at):
            return tensor  # without the root, as where the input needs no gradient, it stays; so does what is normed and in fp32
        if self._x is not None:
            self._saved, self._x = self._place(self._x), None
        self._users += 1
        return Again(self, self.WIDE if tensor.dtype == torch.float32 else self.NORMED, tensor)

    def over(self) -> None:
        self._x = None

    def again(self, which: int) -> Tensor:
        if self._made is None:
            assert self._root is not None
            self._made = _made(self._load(self._saved), self._root)
            self._saved = None
        self._users -= 1
        found = self._made[which]
        if self._users == 0:
            self._made = None
        return found


def _made(x: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
    if x.device.type != "cuda":
        return norm_again(x, roots)
    from ebbtide.policy import norm_kernels

    return norm_kernels.again(x, roots)


def norm_follows(norm: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether all that a norm saves is what `NormCall` makes again, to the bit."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    x = torch.linspace(-3, 5, 6 * len(weight), device=device).to(dtype).view(1, 6, -1).requires_grad_()
    if dtype == torch.float32:
        return False  # it saves its input as it is, and little more
    found: list[tuple[Tensor, Tensor | Again]] = []
    call = NormCall(x.detach(), lambda tensor: tensor, lambda saved: saved)

    def pack(tensor: Tensor) -> Tensor:
        found.append((tensor.detach(), call.pack(tensor.detach())))
        return tensor.detach()

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x)
    made = [(tensor, again.make()) for tensor, again in found if isinstance(again, Again)]
    return bool(made) and all(tensor.dtype == again.dtype and torch.equal(tensor, again) for tensor, again in made)


class GatedCall:
    """One call of a gated MLP: holds its two halves, and makes again the activated one and the product of both."""

    ACTIVATED, PRODUCT = 0, 1

    def __init__(self, activate: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor, place: Place, load: Load) -> None:
        self._activate, self._place, self._load = activate, place, load
        self._halves: tuple[Tensor, Tensor] | None = (gate, up)
        self._gate: Any = None
        self._up: Any = None
        self._places: dict[int, int] = {}
        self._activated: Tensor | None = None
        self._users = 0

    def made(self, which: int, tensor: Tensor) -> Tensor:
        """Tells a tensor that need not be saved; gives it."""
        self._places[tensor.data_ptr()] = which
        return tensor

    def pack(self, tensor: Tensor) -> Again | None:
        which = self._places.get(tensor.data_ptr())
        if which is None:
            return None
        assert self._halves is not None
        gate, up = self._halves
        if self._gate is None:
            self._gate = self._place(gate)
        if which == self.PRODUCT and self._up is None:
            self._up = self._place(up)
        self._users += 1
        return Again(self, which, tensor)

    def over(self) -> None:
        self._halves, self._places = None, {}

    def again(self, which: int) -> Tensor:
        if self._activated is None:
            self._activated, self._gate = self._activate(self._load(self._gate)), None
        found = self._activated
        if which == self.PRODUCT:
            found, self._up = self._activated * self._load(self._up), None
        self._users -= 1
        if self._users == 0:
            self._activated = None
        return found


def gated(mlp: Any, x: Tensor, begin: Callable[[Tensor, Tensor], GatedCall | None] = lambda *_: None) -> Any:
    """A gated MLP; with the call that `begin` gives, only its two halves are saved."""
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    call = begin(gate.detach(), up.detach())
    activated = mlp.act_fn(gate)
    if call is None:
        return mlp.down_proj(activated * up)
    product = call.made(call.ACTIVATED, activated) * up
    return mlp.down_proj(call.made(call.PRODUCT, product))
