"""What the ranks that train one policy say to each other; `Alone` is a rank without others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class Together(Protocol):
    def share(self, sizes: Sequence[int]) -> list[int]:
        """Which of these pieces of work are this rank's: all have about as much."""

    def spread(self, found: dict[int, Tensor]) -> dict[int, Tensor]:
        """What all ranks found, by piece of work."""

    def rounds(self, mine: int) -> int:
        """The most that any rank has to do: all take part in each other's passes, as each has a part of the weights."""

    def summed(self, values: list[float]) -> list[float]:
        """Added up over the ranks that have work of their own."""

    def largest(self, values: list[float]) -> list[float]:
        """The largest of all ranks."""

    def same(self, value: T) -> T:
        """The first rank's, on all of them."""


class Alone:
    def share(self, sizes: Sequence[int]) -> list[int]:
        return list(range(len(sizes)))

    def spread(self, found: dict[int, Tensor]) -> dict[int, Tensor]:
        return found

    def rounds(self, mine: int) -> int:
        return mine

    def summed(self, values: list[float]) -> list[float]:
        return values

    def largest(self, values: list[float]) -> list[float]:
        return values

    def same(self, value: T) -> T:
        return value
