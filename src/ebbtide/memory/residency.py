"""The residency owns all holdings: it enters phases, offloads and fetches tensors, and knows where everything is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ebbtide.memory.arena import Arena, HostBlock
from ebbtide.memory.block_stream import BlockStream
from ebbtide.memory.device_budget import held_unused_bytes, release_cache, unused_bytes
from ebbtide.memory.holding import Bytes, Holding, Lease, bytes_of
from ebbtide.memory.host_copies import HostCopies
from ebbtide.memory.meter import Meter
from ebbtide.memory.mover import Move, Mover
from ebbtide.memory.oom import AllocationHistory, oom_error
from ebbtide.memory.plan import HoldingName, Phase, Plan
from ebbtide.system.torch_internals import storage_id
from ebbtide.system.units import gib


class Residency:
    """`with residency.phase("generate"):` wraps each phase; `residency.need("moments")` is called right before
    their first use. The residency is itself a context manager, for the length of a run."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.arena = Arena(pin=device.type == "cuda")
        self.unpinned_arena = Arena(pin=False)
        """Host memory that only the CPU uses."""
        self.mover = Mover(device)
        self._holdings: dict[HoldingName, Holding] = {}
        self._streams: list[BlockStream] = []
        self._copy_blocks: dict[int, HostBlock] = {}
        """Host memory for copies of storages that stay on the device."""
        self._released = threading.Condition()
        self.meter = Meter(device, self.mover, plan)
        self._oom_advice: Callable[[Phase | None], str] | None = None
        self._history: AllocationHistory | None = None

    def on_oom(self, advice: Callable[[Phase | None], str]) -> None:
        """Sets the planner's advice for running out of memory in a phase (None: before the first one)."""
        self._oom_advice = advice

    def record_history(self, file: Path) -> None:
        """Records the allocator's history, to be written to this file when memory runs out."""
        if self.device.type == "cuda":
            self._history = AllocationHistory(file)

    def __enter__(self) -> Residency:
        return self

    def __exit__(self, *_: object) -> None:
        """Frees the pinned memory once no copy uses it. Holdings that are still offloaded are lost with it."""
        self.mover.synchronize()
        if self._history is not None:
            self._history.close()
        self.arena.close()
        self.unpinned_arena.close()

    # Holdings

    def register(
        self, name: HoldingName, tensors: Sequence[Tensor] | Callable[[], Sequence[Tensor]], *, frozen: bool = False
    ) -> None:
        """Registers tensors on the device as a holding; `frozen` ones never change. For tensors that come and go,
        such as gradients, `tensors` is a function."""
        holding = self._holdings.setdefault(name, Holding(name))
        if holding.storages():
            raise ValueError(f"the holding {name} has its tensors already")
        fixed = tensors if callable(tensors) else list(tensors)
        holding.tensors, holding.frozen = fixed if callable(fixed) else lambda: fixed, frozen
        holding.fixed_bytes = None if callable(tensors) else sum(storage.nbytes() for storage in holding.storages())

    def allocate_host(self, name: HoldingName, sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
        """Allocates host memory of these sizes in bytes, in which a holding, or a part of it, lives in every phase.
        It is pinned if it is copied over the host link."""
        arena = self.arena if pinned else self.unpinned_arena
        arena.reserve(sizes)
        blocks = [arena.allocate(size) for size in sizes]
        self._holdings.setdefault(name, Holding(name)).resident_blocks += blocks
        return [block.data for block in blocks]

    def pin(self, copied: Sequence[HoldingName] = ()) -> None:
        """Pins host memory for all that the plan ever offloads, and for host copies of the holdings `copied` that are
        on the device when they are saved. Called once, when everything is registered and before the first phase."""
        self._pin_blocks(
            [
                holding
                for holding in self._holdings.values()
                if self.plan.is_ever_offloaded(holding.name) and not holding.blocks
            ]
        )
        staying = [
            self._holdings[name]
            for name in copied
            if name in self._holdings and self.plan.place("save", name) != "away"
        ]
        self.arena.reserve([storage.nbytes() for holding in staying for storage in holding.storages()])
        for holding in staying:
            self._blocks_for_copy(holding)

    def _pin_blocks(self, leaving: Sequence[Holding]) -> None:
        """Pins host memory for these holdings, in as few slabs as they need together."""
        sizes = [[storage.nbytes() for storage in holding.storages()] for holding in leaving]
        self.arena.reserve([size for group in sizes for size in group])
        for holding, group in zip(leaving, sizes, strict=True):
            holding.blocks = [self.arena.allocate(size) for size in group]

    def offload_at_start(self, name: HoldingName) -> None:
        """Offloads a holding that the first phase of a step has away, so that what is loaded after it finds its memory
        free. The move is part of no phase."""
        if self.plan.place(self.plan.cycle[0], name) != "away":
            return
        holding = self._holdings[name]
        self._pin_blocks([holding])
        self._offload(holding)
        self.mover.host_waits(holding.last)
        self.mover.drain()

    def has(self, name: HoldingName) -> bool:
        return name in self._holdings

    def holdings(self) -> dict[HoldingName, Bytes]:
        """The bytes of each holding on the device and on the host."""
        return {name: holding.bytes for name, holding in self._holdings.items()}

    @property
    def host_bytes(self) -> int:
        """All host memory of the residency, pinned or not."""
        return self.arena.bytes + self.unpinned_arena.bytes

    def format_table(self, at_peak: Mapping[HoldingName, int] | None = None) -> str:
        """The table of where everything is now, as text. `at_peak`: bytes on the device to show instead."""
        found = self.holdings()
        for name, size in (at_peak or {}).items():
            found[name] = Bytes(size, found[name].host if name in found else 0)
        width = max([10, *map(len, found)])
        lines = [f"{'holding':<{width}} {'device GiB':>10} {'host GiB':>10}"]
        lines += [f"{name:<{width}} {gib(size.device):>10.3f} {gib(size.host):>10.3f}" for name, size in found.items()]
        return "\n".join(lines)

    # Phases

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Enters a phase and measures it. An error inside leaves everything where it is: the next phase begins from
        there."""
        with self._explain_oom(phase), self.meter.phase(phase, self):
            try:
                yield
            finally:
                for stream in self._streams:
                    stream.close()

    def startup(self) -> AbstractContextManager[None]:
        """A context for what is loaded and built before the first phase: it explains running out of memory there."""
        return self._explain_oom(None)

    @contextmanager
    def _explain_oom(self, phase: Phase | None) -> Iterator[None]:
        """Turns an out-of-memory error into a message that says what was where."""
        try:
            yield
        except torch.OutOfMemoryError as problem:
            on_device = {name: size.device for name, size in self.holdings().items()}
            at_peak = on_device if phase is None else on_device | self.meter.last.holdings
            peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else sum(at_peak.values())
            more = [self._oom_advice(phase)] if self._oom_advice is not None else []
            if self._history is not None:
                more.append(self._history.write())
            away = [
                name
                for name in (self.plan.offloaded_in(phase) if phase is not None else ())
                if name in on_device and not self._holdings[name].resident_blocks
            ]
            raise oom_error(
                self.plan,
                phase,
                on_device,
                peak - sum(at_peak.values()),
                self.format_table(at_peak),
                str(problem),
                more,
                away,
                held_unused_bytes(self.device),
            ) from problem

    def enter(self, phase: Phase) -> None:
        """Offloads what the plan wants away in the phase, then fetches what the phase needs, then what the next one
        will need."""
        for name in self.plan.offloaded_in(phase):
            if name in self._holdings:
                self._offload(self._holdings[name])
        # Needed as a whole: then nobody asks for a part of it.
        whole = [one.holding for one in self._streams if one.holding.name in self.plan.needs(phase)]
        if any(holding.away for holding in whole):
            self._wait_for_leaving()  # here, where the wait counts as exposed: the next line would wait as well
            release_cache(self.device)  # so that it gets the addresses of last time, which CUDA graphs read
        for name in self.plan.to_fetch(phase):
            if name in self._holdings:
                self._fetch(self._holdings[name])
        for holding in whole:
            self.need(holding.name)

    def need(self, name: HoldingName) -> None:
        """Called right before the first use on the device: fetches the holding, and compute waits for the move if one
        is under way."""
        holding = self._holdings[name]
        self._fetch(holding)
        if holding.last is not None:
            self.mover.compute_waits(holding.last)
            holding.last = None

    def make_room(self, size: int) -> None:
        """Called before `size` bytes are allocated at once: where these would have to wait for holdings that are being
        offloaded, the wait happens here and counts as exposed."""
        if self.device.type == "cuda" and size > unused_bytes(self.device):
            self._wait_for_leaving()

    def _wait_for_leaving(self) -> None:
        for holding in self._holdings.values():
            if holding.away:
                self.mover.host_waits(holding.last)

    def stream(self, name: HoldingName, parts: Sequence[Sequence[Tensor]]) -> BlockStream:
        """Parts of a holding that are used one after the other in phases in which it is streamed."""
        self._streams.append(found := BlockStream(self._holdings[name], self.mover, parts))
        return found

    def forget(self, name: HoldingName) -> None:
        """Called when the owner of a holding that comes and goes has freed its tensors, wherever they were."""
        self._holdings[name].away = False

    def lease(self, *names: HoldingName, copy_first: Callable[[], None] | None = None) -> Lease:
        """Grants a lease to a reader that works while the loop continues, such as a save. A writer that waits for it
        calls `copy_first`."""
        leased = [self._holdings[name] for name in names]
        lease = Lease(leased, self._released, threading.get_ident(), copy_first)
        with self._released:
            self._released.wait_for(lambda: not any(holding.being_written for holding in leased))
            for holding in leased:
                holding.readers.append(lease)
        for holding in leased:
            self.mover.host_waits(holding.writeback)
        return lease

    def copy_to_host(self, *names: HoldingName, copy: bool = True) -> HostCopies:
        """Starts to copy what is on the device now to the host. What is offloaded is not fetched for it. Without
        `copy`, what is on the device is read there."""
        copies, pairs = HostCopies(), []
        for name in names:
            holding = self._holdings.get(name)
            if holding is None:
                continue
            if holding.resident_blocks or holding.away:
                copies.needs_lease.append(name)
            if holding.away:
                for storage, block in zip(holding.storages(), holding.blocks, strict=True):
                    copies.put(bytes_of(storage), block.data)
                copies.moves.append(holding.last)
                continue
            if holding.last is not None:  # it is being fetched; the copies below run after what compute has queued
                self.mover.compute_waits(holding.last)
            if copy:
                for storage, block in zip(holding.storages(), self._blocks_for_copy(holding), strict=True):
                    device = bytes_of(storage)
                    copies.put(device, block.data)
                    pairs.append((device, block.data))
        if pairs:
            copies.moves.append(self.mover.move_out(pairs, after=None, kept_by_caller=True))
        return copies

    def _blocks_for_copy(self, holding: Holding) -> list[HostBlock]:
        found = []
        for storage in holding.storages():
            key = storage_id(bytes_of(storage))
            if (block := self._copy_blocks.get(key)) is None:
                block = self._copy_blocks[key] = self.arena.allocate(storage.nbytes())
            found.append(block)
        return found

    @contextmanager
    def writing(self, *names: HoldingName) -> Iterator[None]:
        """A context for the writer: fetches the holdings, waits for readers that have a lease, and admits no new ones
        until the writer is done."""
        written = [self._holdings[name] for name in names]
        for holding in written:
            if holding.frozen:
                raise RuntimeError(f"{holding.name} is frozen and cannot be written to")
        with self._released:
            for holding in written:
                if any(lease.thread == threading.get_ident() and lease.copy_first is None for lease in holding.readers):
                    raise RuntimeError(
                        f"{holding.name} would wait for ever: the thread that writes to it holds a lease on it"
                    )
            first_copies = {id(lease): lease.copy_first for holding in written for lease in holding.readers}
        for copy_first in first_copies.values():
            if copy_first is not None:
                copy_first()
        with self._released:
            self._released.wait_for(lambda: not any(holding.readers for holding in written))
            for holding in written:
                holding.being_written = True
        try:
            for name in names:
                self.need(name)
            yield
        finally:
            with self._released:
                for holding in written:
                    holding.being_written = False
                self._released.notify_all()

    def note_writeback(self, name: HoldingName, move: Move | None) -> None:
        """Notes a copy into host memory in which a holding lives: readers of that memory wait for it."""
        if name in self._holdings:
            self._holdings[name].writeback = move

    # Moves

    def _offload(self, holding: Holding) -> None:
        """Copies a holding to the host and frees its device memory. A holding with a reader stays until a later
        phase."""
        with self._released:  # so that no reader comes in meanwhile
            storages = [] if holding.away or holding.readers else holding.storages()
            if not storages:
                return
            sizes = [storage.nbytes() for storage in storages]
            if [block.size for block in holding.blocks] != sizes:
                self._new_blocks(holding, sizes)
            if not holding.has_final_copy:
                pairs = [
                    (bytes_of(storage), block.data)
                    for storage, block in zip(storages, holding.blocks, strict=True)
                    if block.size
                ]
                holding.last = self.mover.move_out(pairs, after=holding.last)
                holding.has_final_copy = holding.frozen
            for storage in storages:
                storage.resize_(0)
            holding.away = True

    def _fetch(self, holding: Holding) -> None:
        """Allocates a holding's device memory and copies it there."""
        if not holding.away:
            return
        storages = holding.storages()
        try:
            for storage, block in zip(storages, holding.blocks, strict=True):
                storage.resize_(block.size)
        except torch.OutOfMemoryError:
            for storage in storages:
                storage.resize_(0)  # the host still has all of it
            raise
        pairs = [
            (bytes_of(storage), block.data)
            for storage, block in zip(storages, holding.blocks, strict=True)
            if block.size
        ]
        holding.last = self.mover.move_in(pairs, after=holding.last)
        holding.away = False

    def _new_blocks(self, holding: Holding, sizes: Sequence[int]) -> None:
        """Allocates blocks for a holding whose sizes changed since it was last offloaded. The move that fetched it may
        still read the old ones."""
        self.mover.host_waits(holding.last)
        for block in holding.blocks:
            self.arena.free(block)
        holding.blocks = [self.arena.allocate(size) for size in sizes]
