"""The one owner of all holdings: it enters phases, issues moves, and knows at any moment where everything is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ebbtide.memory.arena import Arena, Block
from ebbtide.memory.limit import unused_bytes
from ebbtide.memory.meter import GIB, Meter
from ebbtide.memory.mover import Move, Mover
from ebbtide.memory.plan import HOLDINGS, Name, Phase, Plan
from ebbtide.memory.shortage import History, out_of_memory


class Bytes(NamedTuple):
    """Of a holding: how much of it is where. Neither is `nowhere`."""

    device: int
    host: int


@dataclass(eq=False)
class Lease:
    """A reader's: what it holds neither moves nor changes until it is released, at the end of a `with` or by hand."""

    held: Sequence[_Holding]
    released: threading.Condition
    thread: int
    copy_first: Callable[[], None] | None
    """Called by one that wants to change what is held, and waits: may copy the rest, and release."""

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Once, or again: by any thread."""
        with self.released:
            for holding in self.held:
                if self in holding.readers:
                    holding.readers.remove(self)
            self.released.notify_all()


class Twins:
    """Host copies of what was on the device at one moment: `twins(tensor)` is a tensor's, or itself if it lives on the host."""

    def __init__(self) -> None:
        self._bytes: dict[int, Tensor] = {}
        self.leased: list[Name] = []
        """Holdings of which a part is read where it lives on the host, and must be held by a lease for that."""
        self.moves: list[Move | None] = []
        """Copies under way."""

    def put(self, storage: torch.UntypedStorage, host: Tensor) -> None:
        self._bytes[storage._cdata] = host

    def __call__(self, tensor: Tensor) -> Tensor:
        host = self._bytes.get(tensor.untyped_storage()._cdata)
        if host is None:
            return tensor
        start = int(host.storage_offset()) // tensor.element_size() + int(tensor.storage_offset())
        return torch.empty(0, dtype=tensor.dtype).set_(host.untyped_storage(), start, tensor.size(), tensor.stride())


@dataclass
class _Holding:
    """Tensors that live and move as one. Each of their storages is one copy of a move."""

    name: Name
    tensors: Callable[[], Sequence[Tensor]] = lambda: []
    frozen: bool = False
    residents: list[Block] = field(default_factory=list)
    """Host memory in which a part of it lives in every phase."""
    away: bool = False
    """Its bytes are in `blocks`, and its storages are empty."""
    blocks: list[Block] = field(default_factory=list)
    copied: bool = False
    """The blocks hold bytes that never change: leaving again copies nothing."""
    last: Move | None = None
    """A move that compute has not waited for yet."""
    readers: list[Lease] = field(default_factory=list)
    changing: bool = False
    """Its bytes are being written to."""
    returning: Move | None = None
    """The last copy into its resident memory."""

    def storages(self) -> list[torch.UntypedStorage]:
        """Each once: several tensors may share one."""
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self.tensors()}
        return list(found.values())

    @property
    def bytes(self) -> Bytes:
        resident = sum(block.size for block in self.residents)
        if self.away:
            return Bytes(0, resident + sum(block.size for block in self.blocks))
        return Bytes(sum(storage.nbytes() for storage in self.storages()), resident)


class Residency:
    """`with residency.phase("generate"):` around each phase; `residency.need("moments")` right before their first use.

    Itself a context manager, for the length of a run.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.arena = Arena(pin=device.type == "cuda")
        self.unpinned = Arena(pin=False)
        """Host memory that only the CPU uses."""
        self.mover = Mover(device)
        self._holdings: dict[Name, _Holding] = {}
        self._twins: dict[int, Block] = {}
        """Host memory for copies of storages that stay on the device."""
        self._released = threading.Condition()
        self.meter = Meter(device, self.mover)
        self._view: Callable[[Phase | None], str] | None = None
        self._history: History | None = None

    def foresees(self, view: Callable[[Phase | None], str]) -> None:
        """What a planner has to say of a phase when memory runs out in it; None is before the first."""
        self._view = view

    def history_to(self, file: Path) -> None:
        """Has the allocator remember what it did: written to this file when memory runs out."""
        if self.device.type == "cuda":
            self._history = History(file)

    def __enter__(self) -> Residency:
        return self

    def __exit__(self, *_: object) -> None:
        """Lets go of the pinned memory, once no copy uses it. What is still away is gone with it."""
        self.mover.finish()
        if self._history is not None:
            self._history.close()
        self.arena.close()
        self.unpinned.close()

    # What there is

    def hold(self, name: Name, tensors: Sequence[Tensor] | Callable[[], Sequence[Tensor]], *, frozen: bool = False) -> None:
        """Takes charge of tensors on the device; `frozen` ones never change. A function names tensors that come and go, such as gradients."""
        holding = self._holdings.setdefault(name, _Holding(name))
        if holding.storages():
            raise ValueError(f"the holding {name} is held already")
        fixed = tensors if callable(tensors) else list(tensors)
        holding.tensors, holding.frozen = fixed if callable(fixed) else lambda: fixed, frozen

    def host(self, name: Name, sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
        """Host memory of these sizes in bytes, in which a holding, or a part of it, lives in every phase. Pinned if it crosses the link."""
        arena = self.arena if pinned else self.unpinned
        arena.reserve(sizes)
        blocks = [arena.take(size) for size in sizes]
        self._holdings.setdefault(name, _Holding(name)).residents += blocks
        return [block.data for block in blocks]

    def pin(self, copied: Sequence[Name] = ()) -> None:
        """Pins host memory for all that the plan ever sends away, and for copies of what is on the device when it is saved: once, when everything is held and before the first phase."""
        leaving = [holding for holding in self._holdings.values() if self.plan.ever_away(holding.name)]
        sizes = [[storage.nbytes() for storage in holding.storages()] for holding in leaving]
        self.arena.reserve([size for group in sizes for size in group])
        for holding, group in zip(leaving, sizes, strict=True):
            holding.blocks = [self.arena.take(size) for size in group]
        staying = [self._holdings[name] for name in copied if name in self._holdings and self.plan.place("save", name) != "away"]
        self.arena.reserve([storage.nbytes() for holding in staying for storage in holding.storages()])
        for holding in staying:
            self._twin_blocks(holding)

    def holds(self, name: Name) -> bool:
        return name in self._holdings

    def holdings(self) -> dict[Name, Bytes]:
        """How much of each holding is where."""
        return {name: holding.bytes for name, holding in self._holdings.items()}

    @property
    def host_bytes(self) -> int:
        """Host memory taken, pinned or not."""
        return self.arena.bytes + self.unpinned.bytes

    def table(self) -> str:
        """Where everything is now, as text."""
        lines = [f"{'holding':<10} {'device GiB':>10} {'host GiB':>10}"]
        lines += [f"{name:<10} {size.device / GIB:>10.3f} {size.host / GIB:>10.3f}" for name, size in self.holdings().items()]
        return "\n".join(lines)

    # Phases

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Enters a phase and measures it. What goes wrong inside leaves everything where it is: the next phase begins from there."""
        with self._explained(phase), self.meter.phase(phase, self):
            yield

    def starting(self) -> AbstractContextManager[None]:
        """Around what is loaded and built before the first phase."""
        return self._explained(None)

    @contextmanager
    def _explained(self, phase: Phase | None) -> Iterator[None]:
        """Memory that runs out becomes a message with what was where."""
        try:
            yield
        except torch.OutOfMemoryError as problem:
            on_device = {name: size.device for name, size in self.holdings().items()}
            peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else sum(on_device.values())
            more = [self._view(phase)] if self._view is not None else []
            if self._history is not None:
                more.append(self._history.write())
            away = [
                name
                for name in (self.plan.away(phase) if phase is not None else ())
                if name in on_device and not self._holdings[name].residents
            ]
            raise out_of_memory(phase, on_device, peak, self.table(), str(problem), more, away) from problem

    def enter(self, phase: Phase) -> None:
        """Sends away what the phase does not want, then brings what it needs, then what the next one will need."""
        for name in HOLDINGS:
            if name in self._holdings and self.plan.place(phase, name) == "away":
                self._leave(self._holdings[name])
        for name in self.plan.fetched(phase):
            if name in self._holdings:
                self._fetch(self._holdings[name])

    def need(self, name: Name) -> None:
        """Right before the first use on the device: compute waits for the move, if one is under way."""
        holding = self._holdings[name]
        self._fetch(holding)
        if holding.last is not None:
            self.mover.compute_waits(holding.last)
            holding.last = None

    def make_room(self, size: int) -> None:
        """Before so many bytes are allocated at once: where they have to wait for what is leaving, that is waited for here, and counted."""
        if self.device.type == "cuda" and size > unused_bytes(self.device):
            for holding in self._holdings.values():
                if holding.away:
                    self.mover.host_waits(holding.last)

    def dropped(self, name: Name) -> None:
        """Its owner let go of a holding that comes and goes, wherever it was."""
        self._holdings[name].away = False

    def lease(self, *names: Name, copy_first: Callable[[], None] | None = None) -> Lease:
        """For a reader beside the loop, such as a save. `copy_first` is called by a writer that waits for it."""
        held = [self._holdings[name] for name in names]
        lease = Lease(held, self._released, threading.get_ident(), copy_first)
        with self._released:
            self._released.wait_for(lambda: not any(holding.changing for holding in held))
            for holding in held:
                holding.readers.append(lease)
        for holding in held:
            self.mover.host_waits(holding.returning)
        return lease

    def copied(self, *names: Name, copy: bool = True) -> Twins:
        """Begins host copies of what is on the device now. What is away is not brought back for it. Without `copy`, what is on the device is read there."""
        twins, pairs = Twins(), []
        for name in names:
            holding = self._holdings.get(name)
            if holding is None:
                continue
            if holding.residents or holding.away:
                twins.leased.append(name)
            if holding.away:
                for storage, block in zip(holding.storages(), holding.blocks, strict=True):
                    twins.put(storage, block.data)
                twins.moves.append(holding.last)
                continue
            if holding.last is not None:  # still coming in; what is read below comes after what compute has queued
                self.mover.compute_waits(holding.last)
            if copy:
                for storage, block in zip(holding.storages(), self._twin_blocks(holding), strict=True):
                    twins.put(storage, block.data)
                    pairs.append((_bytes(storage), block.data))
        if pairs:
            twins.moves.append(self.mover.move_out(pairs, after=None, held=True))
        return twins

    def _twin_blocks(self, holding: _Holding) -> list[Block]:
        found = []
        for storage in holding.storages():
            if (block := self._twins.get(storage._cdata)) is None:
                block = self._twins[storage._cdata] = self.arena.take(storage.nbytes())
            found.append(block)
        return found

    @contextmanager
    def changing(self, *names: Name) -> Iterator[None]:
        """For the one that writes: has them on the device, waits for readers that hold a lease, and lets no new ones in until it is done."""
        held = [self._holdings[name] for name in names]
        for holding in held:
            if holding.frozen:
                raise RuntimeError(f"{holding.name} is frozen and cannot be written to")
        with self._released:
            for holding in held:
                if any(lease.thread == threading.get_ident() and lease.copy_first is None for lease in holding.readers):
                    raise RuntimeError(f"{holding.name} would wait for ever: the thread that writes to it holds a lease on it")
            asked = {id(lease): lease.copy_first for holding in held for lease in holding.readers}
        for copy_first in asked.values():
            if copy_first is not None:
                copy_first()
        with self._released:
            self._released.wait_for(lambda: not any(holding.readers for holding in held))
            for holding in held:
                holding.changing = True
        try:
            for name in names:
                self.need(name)
            yield
        finally:
            with self._released:
                for holding in held:
                    holding.changing = False
                self._released.notify_all()

    def returning(self, name: Name, move: Move | None) -> None:
        """Tells of a copy into host memory in which a holding lives: readers there wait for it."""
        if name in self._holdings:
            self._holdings[name].returning = move

    # Moves

    def _leave(self, holding: _Holding) -> None:
        """Copies a holding to the host and frees its device memory. One with a reader stays until a later phase."""
        with self._released:  # no reader comes in meanwhile
            storages = [] if holding.away or holding.readers else holding.storages()
            if not storages:
                return
            sizes = [storage.nbytes() for storage in storages]
            if [block.size for block in holding.blocks] != sizes:
                self._new_blocks(holding, sizes)
            if not holding.copied:
                pairs = [(_bytes(storage), block.data) for storage, block in zip(storages, holding.blocks, strict=True) if block.size]
                holding.last = self.mover.move_out(pairs, after=holding.last)
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
        pairs = [(_bytes(storage), block.data) for storage, block in zip(storages, holding.blocks, strict=True) if block.size]
        holding.last = self.mover.move_in(pairs, after=holding.last)
        holding.away = False

    def _new_blocks(self, holding: _Holding, sizes: Sequence[int]) -> None:
        """Blocks for a holding that changed since it last left. The old ones may still be read by the move that brought it back."""
        self.mover.host_waits(holding.last)
        for block in holding.blocks:
            self.arena.give_back(block)
        holding.blocks = [self.arena.take(size) for size in sizes]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """A storage as a flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
