"""The arena: host memory that is pinned once in slabs and cut into blocks.

Pinning costs 0.1 s per GiB for memory that is already touched (and 0.7 s per GiB through `pin_memory=True`, which also
rounds up to a power of two), so it is done once, before the first step, for all that the plan will ever offload.
On a CPU the same code cuts ordinary memory.
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
from ebbtide.system.torch_internals import cuda_host_register, cuda_host_unregister
from ebbtide.system.units import GIB, ceil_div, gib

SLAB = 4 * GIB
ALIGNMENT = 4096  # blocks start on a page


def check_host_budget(needs: dict[str, int], budget_gib: float | None, allocated: int = 0) -> int:
    """Returns the bytes that `needs` (holding -> bytes) add up to, or raises an error with the numbers if they exceed
    the budget. `allocated`: how many of these bytes the run has already."""
    wanted = sum(_aligned(size) for size in needs.values())
    free = free_host_bytes() + allocated
    budget = int(budget_gib * GIB) if budget_gib is not None else int(HOST_SHARE * free)
    if wanted > min(budget, free):
        listed = ", ".join(f"{name} {gib(size):.2f}" for name, size in needs.items() if size)
        if budget_gib is None:
            limit = f"{HOST_SHARE:.0%} of the free host memory = {gib(budget):.2f} ({gib(free):.2f} GiB are free)"
        elif wanted > free:
            limit = f"the {gib(free):.2f} GiB that are free"
        else:
            limit = f"`memory.host_budget_gib` = {budget_gib:g} ({gib(free):.2f} GiB are free)"
        more = ", or raise `memory.host_budget_gib`" if wanted <= free else ""
        raise UserError(
            f"the memory plan puts {gib(wanted):.2f} GiB into host memory ({listed}), more than {limit}:"
            " name fewer holdings in `memory.offload`,"
            " keep more of the optimizer on the device (`optimizer.place`, `optimizer.cpu_fraction`),"
            " offload fewer activations (`memory.activations`),"
            f" let saves wait for the disk (`checkpoint.async_save: false`){more}"
        )
    return wanted


@dataclass(frozen=True)
class HostBlock:
    """A piece of a slab; `data` has its bytes."""

    slab: int
    offset: int
    size: int
    data: Tensor  # [size], uint8


class Arena:
    """Slabs of host memory. A block is allocated in the first gap that fits, and adjacent gaps are merged."""

    def __init__(self, pin: bool, slab: int = SLAB) -> None:
        self._pin, self._slab = pin, slab
        self._slabs: list[Tensor] = []
        # Unpins also where nobody closes the arena. Left pinned, CUDA would mistake whatever is mapped at these
        # addresses later for the old pages, and copy those.
        self._unpin = weakref.finalize(self, _unpin, self._slabs if pin else [])
        self._unpin.atexit = False
        self._gaps: list[list[tuple[int, int]]] = []  # per slab: (offset, size), in order

    def reserve(self, sizes: Sequence[int]) -> None:
        """Allocates and pins slabs that hold blocks of exactly these sizes, with nothing left over."""
        slab = 0
        for size in map(_aligned, sizes):
            if slab and slab + size > self._slab:
                self._grow(slab)
                slab = 0
            slab += size
        if slab:
            self._grow(slab)

    def allocate(self, size: int) -> HostBlock:
        """Allocates a block of `size` bytes; where no gap fits, a slab of its own is pinned."""
        if not size:  # the empty shard of a tensor that is wholly on other ranks
            return HostBlock(0, 0, 0, torch.empty(0, dtype=torch.uint8))
        wanted = _aligned(size)
        for slab, gaps in enumerate(self._gaps):
            for place, (offset, free) in enumerate(gaps):
                if free >= wanted:
                    gaps[place : place + 1] = [(offset + wanted, free - wanted)] if free > wanted else []
                    return HostBlock(slab, offset, size, self._slabs[slab][offset : offset + size])
        self._grow(wanted)
        return self.allocate(size)

    def free(self, block: HostBlock) -> None:
        """Makes a block's bytes a gap of its slab."""
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
        """The size of all slabs together."""
        return sum(slab.numel() for slab in self._slabs)

    @property
    def used_bytes(self) -> int:
        """The size of all blocks in use."""
        return self.bytes - sum(size for gaps in self._gaps for _, size in gaps)

    def close(self) -> None:
        """Unpins and frees all slabs. Blocks must not be used after this."""
        self._unpin()
        self._slabs, self._gaps = [], []

    def _grow(self, size: int) -> None:
        """Adds a slab of `size` bytes, rounded up."""
        size = _aligned(size)
        memory = mmap.mmap(-1, size)
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)  # 2 MiB pages: fewer to touch, to pin and to walk
        # A forked child would share the pages, and the first write after that would move this process to other pages.
        memory.madvise(mmap.MADV_DONTFORK)
        slab = torch.frombuffer(memory, dtype=torch.uint8)
        slab.zero_()  # all threads touch it at once; pinning untouched memory touches it one page at a time
        if self._pin:
            _check(cuda_host_register(slab.data_ptr(), size))
        self._slabs.append(slab)
        self._gaps.append([(0, size)])


def _aligned(size: int) -> int:
    """`size`, rounded up to whole pages."""
    return ceil_div(size, ALIGNMENT) * ALIGNMENT


def _unpin(slabs: Sequence[Tensor]) -> None:
    for slab in slabs:
        _check(cuda_host_unregister(slab.data_ptr()))


def _check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"pinning host memory failed (CUDA error {code}): check `ulimit -l` and the free memory")
