"""The one owner of all holdings: it enters phases, issues moves, and knows at any moment where everything is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ebbtide.memory.arena import Arena, Block
from ebbtide.memory.meter import GIB, Meter
from ebbtide.memory.mover import Move, Mover
from ebbtide.memory.plan import HOLDINGS, Name, Phase, Plan

Where = Literal["device", "host", "nowhere"]


@dataclass
class _Holding:
    """Tensors that live and move as one. Each of their storages is one copy of a move."""

    name: Name
    tensors: Callable[[], Sequence[Tensor]]
    frozen: bool
    away: bool = False
    """Its bytes are in `blocks`, and its storages are empty."""
    blocks: list[Block] = field(default_factory=list)
    copied: bool = False
    """The blocks hold bytes that never change: leaving again copies nothing."""
    last: Move | None = None
    """A move that compute has not waited for yet."""
    readers: list[int] = field(default_factory=list)
    """The threads that hold a lease."""

    def storages(self) -> list[torch.UntypedStorage]:
        """Each once: several tensors may share one."""
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self.tensors()}
        return list(found.values())

    @property
    def bytes(self) -> int:
        return sum(block.size for block in self.blocks) if self.away else sum(storage.nbytes() for storage in self.storages())

    @property
    def where(self) -> Where:
        if self.away:
            return "host"
        return "device" if self.storages() else "nowhere"


class Residency:
    """`with residency.phase("generate"):` around each phase; `residency.need("moments")` right before their first use.

    Itself a context manager, for the length of a run.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.arena = Arena(pin=device.type == "cuda")
        self._mover = Mover(device)
        self._holdings: dict[Name, _Holding] = {}
        self._released = threading.Condition()
        self.meter = Meter(device, self._mover)

    def __enter__(self) -> Residency:
        return self

    def __exit__(self, *_: object) -> None:
        """Lets go of the pinned memory, once no copy uses it. What is still away is gone with it."""
        self._mover.finish()
        self.arena.close()

    # What there is

    def hold(self, name: Name, tensors: Sequence[Tensor] | Callable[[], Sequence[Tensor]], *, frozen: bool = False) -> None:
        """Takes charge of tensors on the device; `frozen` ones never change. A function names tensors that come and go, such as gradients."""
        if name in self._holdings:
            raise ValueError(f"the holding {name} is held already")
        fixed = tensors if callable(tensors) else list(tensors)
        self._holdings[name] = _Holding(name, fixed if callable(fixed) else lambda: fixed, frozen)

    def pin(self) -> None:
        """Pins host memory for all that the plan ever sends away: once, when everything is held and before the first phase."""
        leaving = [holding for holding in self._holdings.values() if self.plan.ever_away(holding.name)]
        sizes = [[storage.nbytes() for storage in holding.storages()] for holding in leaving]
        self.arena.reserve([size for group in sizes for size in group])
        for holding, group in zip(leaving, sizes, strict=True):
            holding.blocks = [self.arena.take(size) for size in group]

    def holdings(self) -> dict[Name, tuple[Where, int]]:
        """Where each holding is, and its bytes."""
        return {name: (holding.where, holding.bytes) for name, holding in self._holdings.items()}

    @property
    def host_bytes(self) -> int:
        """Host memory pinned."""
        return self.arena.bytes

    def table(self) -> str:
        """Where everything is now, as text."""
        lines = [f"{'holding':<10} {'place':<8} {'GiB':>9}"]
        lines += [f"{name:<10} {where:<8} {size / GIB:>9.3f}" for name, (where, size) in self.holdings().items()]
        return "\n".join(lines)

    # Phases

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Enters a phase and measures it. What goes wrong inside leaves everything where it is: the next phase begins from there."""
        return self.meter.phase(phase, self)

    def enter(self, phase: Phase) -> None:
        """Sends away what the phase does not want, then brings what it needs, then what the next one will need."""
        for name in HOLDINGS:
            if name in self._holdings and self.plan.place(phase, name) == "away":
                self._leave(self._holdings[name])
        for name in self.plan.fetched(phase):
            if name in self._holdings:
                self._fetch(self._holdings[name])

    def need(self, name: Name, *, write: bool = False) -> None:
        """Right before the first use on the device: compute waits for the move, if one is under way.

        With `write` its bytes are about to change, so readers that hold a lease are waited for.
        """
        holding = self._holdings[name]
        if write:
            self._wait_for_readers(holding)
        self._fetch(holding)
        if holding.last is not None:
            self._mover.compute_waits(holding.last)
            holding.last = None

    def dropped(self, name: Name) -> None:
        """Its owner let go of a holding that comes and goes, wherever it was."""
        self._holdings[name].away = False

    @contextmanager
    def lease(self, *names: Name) -> Iterator[None]:
        """For a reader beside the loop, such as a save: what it holds neither moves nor changes until it is done."""
        me = threading.get_ident()
        with self._released:
            for name in names:
                self._holdings[name].readers.append(me)
        try:
            yield
        finally:
            with self._released:
                for name in names:
                    self._holdings[name].readers.remove(me)
                self._released.notify_all()

    def _wait_for_readers(self, holding: _Holding) -> None:
        if holding.frozen:
            raise RuntimeError(f"{holding.name} is frozen and cannot be written to")
        with self._released:
            if threading.get_ident() in holding.readers:
                raise RuntimeError(f"{holding.name} would wait for ever: the thread that writes to it holds a lease on it")
            self._released.wait_for(lambda: not holding.readers)

    # Moves

    def _leave(self, holding: _Holding) -> None:
        """Copies a holding to the host and frees its device memory. One with a reader stays until a later phase."""
        storages = [] if holding.away or holding.readers else holding.storages()
        if not storages:
            return
        sizes = [storage.nbytes() for storage in storages]
        if [block.size for block in holding.blocks] != sizes:
            self._new_blocks(holding, sizes)
        if not holding.copied:
            pairs = [(_bytes(storage), block.data) for storage, block in zip(storages, holding.blocks, strict=True)]
            holding.last = self._mover.move_out(pairs, after=holding.last)
            holding.copied = holding.frozen
        for storage in storages:
            storage.resize_(0)
        holding.away = True

    def _fetch(self, holding: _Holding) -> None:
        """Gives a holding device memory and copies it there."""
        if not holding.away:
            return
        storages = holding.storages()
        try:
            for storage, block in zip(storages, holding.blocks, strict=True):
                storage.resize_(block.size)
        except torch.OutOfMemoryError:
            for storage in storages:
                storage.resize_(0)  # it is still on the host, whole
            raise
        pairs = [(_bytes(storage), block.data) for storage, block in zip(storages, holding.blocks, strict=True)]
        holding.last = self._mover.move_in(pairs, after=holding.last)
        holding.away = False

    def _new_blocks(self, holding: _Holding, sizes: Sequence[int]) -> None:
        """Blocks for a holding that changed since it last left. The old ones may still be read by the move that brought it back."""
        self._mover.host_waits(holding.last)
        for block in holding.blocks:
            self.arena.give_back(block)
        holding.blocks = [self.arena.take(size) for size in sizes]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """A storage as a flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
