"""What one forward of a fused block saves for its backward, by the names of `memory.activations`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ebbtide.config.memory import ActivationName


class Saved(Protocol):
    """What one forward of one block saves for its backward."""

    def put(self, name: ActivationName, *tensors: Tensor) -> None:
        """Keeps or offloads tensors, or drops them if they are to be recomputed."""

    def take(self, name: ActivationName) -> tuple[Tensor, ...] | None:
        """The tensors of this name, once; None if they were dropped."""


class Dropped:
    """Saves nothing: for a forward without a backward."""

    def put(self, name: ActivationName, *tensors: Tensor) -> None:
        pass

    def take(self, name: ActivationName) -> None:
        return None


def recompute_or(found: tuple[Tensor, ...] | None, recompute: Callable[[], Tensor]) -> Tensor:
    """A saved tensor, or what recomputes it."""
    return found[0] if found else recompute()


def taken(saved: Saved, name: ActivationName) -> tuple[Tensor, ...]:
    """The tensors of a name that a block always saves."""
    found = saved.take(name)
    assert found is not None, f"a block always saves its {name}"
    return found
