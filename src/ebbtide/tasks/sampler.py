"""Draws the next problems: every problem once per epoch, in an order that depends on the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Generic, TypeVar

from ebbtide.errors import UserError

Item = TypeVar("Item")


class Sampler(Generic[Item]):
    """Shuffled epochs over `items`. Its state is two numbers: the epoch, and the position in it."""

    def __init__(self, items: Sequence[Item], seed: int) -> None:
        self._items, self._seed = items, seed
        self.epoch, self.position = 0, 0
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self._items)))
        random.Random(f"{self._seed}/{self.epoch}").shuffle(order)
        return order

    def seek(self, epoch: int, position: int) -> None:
        """Continues where another sampler of the same items and seed was."""
        if position > len(self._items):
            raise UserError(
                f"the checkpoint is at item {position} of an epoch, but this run has {len(self._items)} problems or"
                " examples: resume with the `task` or `data` of the checkpoint"
            )
        self.epoch, self.position = epoch, position
        self._order = self._shuffled()

    def draw(self, count: int) -> list[Item]:
        """The next items."""
        drawn = []
        for _ in range(count):
            if self.position == len(self._order):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._shuffled()
            drawn.append(self._items[self._order[self.position]])
            self.position += 1
        return drawn
