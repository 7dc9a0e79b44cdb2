"""Draws the next problems: every problem once per epoch, in an order that depends on the seed; of several tasks in
turns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from ebbtide.errors import UserError
from ebbtide.tasks.mixed import turns

Item = TypeVar("Item")


class Order(Protocol[Item]):
    """An order in which items are drawn, whose state is two numbers."""

    epoch: int
    position: int

    def seek(self, epoch: int, position: int) -> None: ...

    def draw(self, count: int) -> list[Item]:
        """The next items."""
        ...


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


class MixedSampler(Generic[Item]):
    """Draws of several lists in turns by their weights, of each as a sampler of its own does. Its state is how many
    items it has drawn. In place of a list there may be an order that keeps its own state."""

    def __init__(self, items: Sequence[Sequence[Item] | Order[Item]], weights: Sequence[float], seed: int) -> None:
        self._items, self._weights, self._seed = items, weights, seed
        self.seek(0, 0)

    def seek(self, epoch: int, position: int) -> None:
        """Continues where another sampler of the same items, weights and seed was."""
        if epoch:
            raise UserError(
                "the checkpoint is of a run with one task, and this run has `task.mix`: resume with the `task` of the"
                " checkpoint"
            )
        self.epoch, self.position = 0, position
        self._samplers: list[Order[Item]] = [
            Sampler(some, self._seed) if isinstance(some, Sequence) else some for some in self._items
        ]
        self._turns = turns(self._weights)
        counts = [0] * len(self._items)
        for _ in range(position):
            counts[next(self._turns)] += 1
        for sampler, some, count in zip(self._samplers, self._items, counts, strict=True):
            sampler.seek(*(divmod(count, len(some)) if isinstance(some, Sequence) else (0, count)))

    def draw(self, count: int) -> list[Item]:
        """The next items."""
        self.position += count
        return [self._samplers[next(self._turns)].draw(1)[0] for _ in range(count)]
