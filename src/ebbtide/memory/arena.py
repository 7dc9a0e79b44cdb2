"""Host memory, pinned once in slabs and cut into blocks.

Pinning costs 0.1 s per GiB for memory that is already there (and 0.7 s per GiB through `pin_memory=True`, which also rounds up to a power of two),
so it is done once, before the first step, for all that the plan will ever send away. On a CPU the same code cuts ordinary memory.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from ebbtide.errors import UserError
from ebbtide.memory.host import free_host_bytes
from ebbtide.memory.plan import HOST_SHARE

GIB = 2**30
SLAB = 4 * GIB
ALIGNMENT = 4096  # blocks start on a page


def check_host_budget(needs: dict[str, int], budget_gib: float | None, taken: int = 0) -> int:
    """The bytes that `needs` (holding -> bytes) add up to, or an error with the numbers if they exceed the budget. `taken` of them are there already."""
    wanted = sum(_aligned(size) for size in needs.values())
    free = free_host_bytes() + taken
    budget = int(budget_gib * GIB) if budget_gib is not None else int(HOST_SHARE * free)
    if wanted > min(budget, free):
        listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in needs.items() if size)
        if budget_gib is None:
            which = f"{HOST_SHARE:.0%} of the free host memory = {budget / GIB:.2f} ({free / GIB:.2f} GiB are free)"
        elif wanted > free:
            which = f"the {free / GIB:.2f} GiB that are free"
        else:
            which = f"`memory.host_budget_gib` = {budget_gib:g} ({free / GIB:.2f} GiB are free)"
        more = ", or raise `memory.host_budget_gib`" if wanted <= free else ""
        raise UserError(
            f"the memory plan sends {wanted / GIB:.2f} GiB to host memory ({listed}), more than {which}: name fewer holdings in `memory.away`, keep more of the optimizer on the device "
            f"(`optimizer.place`, `optimizer.cpu_fraction`), offload fewer activations (`memory.activations`), let saves wait for the disk (`checkpoint.async_save: false`){more}"
        )
    return wanted


@dataclass(frozen=True)
class Block:
    """A piece of a slab: `data` is its bytes."""

    slab: int
    offset: int
    size: int
    data: Tensor  # [size], uint8


class Arena:
    """Slabs of host memory; blocks are taken from the first gap that fits, and gaps that meet become one."""

    def __init__(self, pin: bool, slab: int = SLAB) -> None:
        self._pin, self._slab = pin, slab
        self._slabs: list[Tensor] = []
        # Also for an arena that nobody closes. Left pinned, CUDA would take whatever is mapped at these addresses later for the old pages, and copy those.
        self._unpin = weakref.finalize(self, _unpin, self._slabs if pin else [])
        self._unpin.atexit = False
        self._gaps: list[list[tuple[int, int]]] = []  # per slab: (offset, size), in order

    def reserve(self, sizes: Sequence[int]) -> None:
        """Makes slabs that hold blocks of exactly these sizes, with nothing left over: the one time that memory is pinned."""
        slab = 0
        for size in map(_aligned, sizes):
            if slab and slab + size > self._slab:
                self._grow(slab)
                slab = 0
            slab += size
        if slab:
            self._grow(slab)

    def take(self, size: int) -> Block:
        """A block of `size` bytes; where no gap is left for it, a slab of its own is pinned."""
        if not size:  # as for a tensor of which other ranks have all
            return Block(0, 0, 0, torch.empty(0, dtype=torch.uint8))
        wanted = _aligned(size)
        for slab, gaps in enumerate(self._gaps):
            for place, (offset, free) in enumerate(gaps):
                if free >= wanted:
                    gaps[place : place + 1] = [(offset + wanted, free - wanted)] if free > wanted else []
                    return Block(slab, offset, size, self._slabs[slab][offset : offset + size])
        self._grow(wanted)
        return self.take(size)

    def give_back(self, block: Block) -> None:
        if not block.size:
            return
        gaps = self._gaps[block.slab]
        gaps.append((block.offset, _aligned(block.size)))
        gaps.sort()
        merged: list[tuple[int, int]] = []
        for offset, size in gaps:
            if merged and merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._gaps[block.slab] = merged

    @property
    def bytes(self) -> int:
        """All slabs together: what is pinned."""
        return sum(slab.numel() for slab in self._slabs)

    @property
    def taken(self) -> int:
        return self.bytes - sum(size for gaps in self._gaps for _, size in gaps)

    def close(self) -> None:
        self._unpin()
        self._slabs, self._gaps = [], []

    def _grow(self, size: int) -> None:
        size = _aligned(size)
        memory = mmap.mmap(-1, size)
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)  # 2 MiB pages: fewer to touch, to pin and to walk
        memory.madvise(mmap.MADV_DONTFORK)  # a child of fork would share the pages, and the first write then give this process other ones
        slab = torch.frombuffer(memory, dtype=torch.uint8)
        slab.zero_()  # touched by all threads at once; pinning untouched memory does it one page at a time
        if self._pin:
            _check(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), size, 0))
        self._slabs.append(slab)
        self._gaps.append([(0, size)])


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _unpin(slabs: Sequence[Tensor]) -> None:
    for slab in slabs:
        _check(torch.cuda.cudart().cudaHostUnregister(slab.data_ptr()))


def _check(status: object) -> None:
    if int(status) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"pinning host memory failed (CUDA error {int(status)}): check `ulimit -l` and the free memory")  # type: ignore[call-overload]
