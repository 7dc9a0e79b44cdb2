"""Recomputation of saved tensors inside one module's call, without recomputing the whole block.

A norm in transformers saves its input in fp32 and the normalized input in the weights' type: 12 bytes per number where
the input has 2. Both follow from the input and the reciprocal root (one number per token), by a conversion and a
multiplication. A gated MLP saves its activated half and the product of both halves: both follow from the halves. The
operations and the numbers are the same, so the bits are the same. Whether a model's modules are of this kind is found
out by trying them, not by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Place = Callable[[Tensor], Any]
"""Saves a tensor, possibly offloaded; returns what `Load` needs."""
Load = Callable[[Any], Tensor]
"""Loads a tensor that `Place` saved."""


class RecomputingCall(Protocol):
    """One call of a module that recomputes what it saves."""

    def pack(self, tensor: Tensor) -> Tensor | Recomputed | None:
        """What is saved in place of a tensor; None if this call does not recompute it."""
        ...

    def recompute(self, which: int) -> Tensor:
        """Recomputes a saved tensor."""
        ...

    def end_forward(self) -> None:
        """Marks the end of the module's forward."""
        ...


class Recomputed:
    """A placeholder for a saved tensor: a tensor that a call recomputes, or a view of it."""

    def __init__(self, call: RecomputingCall, which: int, tensor: Tensor) -> None:
        self._call, self._which, self._size, self._stride = call, which, tensor.size(), tensor.stride()

    def make(self) -> Tensor:
        return self._call.recompute(self._which).as_strided(self._size, self._stride)


def recompute_norm(x: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
    """(a norm's input in fp32, the normalized input): the reference for norm_kernels.py, and the implementation on a
    CPU."""
    wide = x.float()
    return wide, torch.mul(wide, roots, out=torch.empty_like(x))  # Rounded when it is written.


class NormCall:
    """One call of a norm: saves its input only, and recomputes the rest."""

    WIDE, NORMED = 0, 1

    def __init__(self, x: Tensor, place: Place, load: Load) -> None:
        self._x: Tensor | None = x
        self._shape, self._place, self._load = x.shape, place, load
        self._saved: Any = None
        self._root: Tensor | None = None
        self._wide_at = 0  # Address of the input in fp32.
        self._made: tuple[Tensor, Tensor] | None = None
        self._users = 0

    def pack(self, tensor: Tensor) -> Tensor | Recomputed:
        if tensor.shape == (*self._shape[:-1], 1):
            self._root = tensor
            return tensor
        if tensor.shape != self._shape or not tensor.is_contiguous():
            return tensor
        if tensor.dtype == torch.float32 and self._root is None:
            self._wide_at = tensor.data_ptr()
        elif self._root is None or (tensor.dtype == torch.float32 and tensor.data_ptr() != self._wide_at):
            # The tensor is saved as it is if there is no root, as when the input needs no gradient, or if it is the
            # normalized input in fp32.
            return tensor
        if self._x is not None:
            self._saved, self._x = self._place(self._x), None
        self._users += 1
        return Recomputed(self, self.WIDE if tensor.dtype == torch.float32 else self.NORMED, tensor)

    def end_forward(self) -> None:
        self._x = None

    def recompute(self, which: int) -> Tensor:
        if self._made is None:
            assert self._root is not None
            self._made = _recompute_norm(self._load(self._saved), self._root)
            self._saved = None
        self._users -= 1
        found = self._made[which]
        if self._users == 0:
            self._made = None
        return found


def _recompute_norm(x: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
    if x.device.type != "cuda":
        return recompute_norm(x, roots)
    from ebbtide.policy import norm_kernels

    return norm_kernels.recompute_norm(x, roots)


def is_norm_recomputable(norm: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `NormCall` recomputes all that a norm saves, bit for bit."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    x = torch.linspace(-3, 5, 6 * len(weight), device=device).to(dtype).view(1, 6, -1).requires_grad_()
    if dtype == torch.float32:
        return False  # In fp32 a norm saves its input as it is, and little more.
    found: list[tuple[Tensor, Tensor | Recomputed]] = []
    call = NormCall(x.detach(), lambda tensor: tensor, lambda saved: saved)

    def pack(tensor: Tensor) -> Tensor:
        found.append((tensor.detach(), call.pack(tensor.detach())))
        return tensor.detach()

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x)
    pairs = [(tensor, saved.make()) for tensor, saved in found if isinstance(saved, Recomputed)]
    return bool(pairs) and all(tensor.dtype == made.dtype and torch.equal(tensor, made) for tensor, made in pairs)


class GatedCall:
    """One call of a gated MLP: saves its two halves, and recomputes the activated one and the product of both."""

    ACTIVATED, PRODUCT = 0, 1

    def __init__(
        self, activate: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor, place: Place, load: Load
    ) -> None:
        self._activate, self._place, self._load = activate, place, load
        self._halves: tuple[Tensor, Tensor] | None = (gate, up)
        self._gate: Any = None
        self._up: Any = None
        self._places: dict[int, int] = {}
        self._activated: Tensor | None = None
        self._users = 0

    def register(self, which: int, tensor: Tensor) -> Tensor:
        """Registers a tensor that need not be saved, and returns it."""
        self._places[tensor.data_ptr()] = which
        return tensor

    def pack(self, tensor: Tensor) -> Recomputed | None:
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
        return Recomputed(self, which, tensor)

    def end_forward(self) -> None:
        self._halves, self._places = None, {}

    def recompute(self, which: int) -> Tensor:
        if self._activated is None:
            self._activated, self._gate = self._activate(self._load(self._gate)), None
        found = self._activated
        if which == self.PRODUCT:
            found, self._up = self._activated * self._load(self._up), None
        self._users -= 1
        if self._users == 0:
            self._activated = None
        return found


@dataclass(frozen=True)
class GatedMLP:
    """The parts of a gated MLP."""

    gate: Any
    up: Any
    activate: Any
    down: Any

    def __call__(self, x: Tensor, begin: Callable[[Tensor, Tensor], GatedCall | None] = lambda *_: None) -> Any:
        """The MLP's forward; if `begin` returns a call, only the two halves are saved."""
        gate, up = self.gate(x), self.up(x)
        call = begin(gate.detach(), up.detach())
        activated = self.activate(gate)
        if call is None:
            return self.down(activated * up)
        product = call.register(call.ACTIVATED, activated) * up
        return self.down(call.register(call.PRODUCT, product))
