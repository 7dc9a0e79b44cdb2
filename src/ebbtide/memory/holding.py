"""A holding: tensors that live and move as one, and the leases of those that read it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ebbtide.memory.arena import HostBlock
from ebbtide.memory.mover import Move
from ebbtide.memory.plan import HoldingName
from ebbtide.system.torch_internals import storage_id


class Bytes(NamedTuple):
    """How many bytes of a holding are on the device and on the host; both are 0 while it does not exist."""

    device: int
    host: int


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Views a storage as a flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass
class Holding:
    """Tensors that live and move as one. A move copies each of their storages once."""

    name: HoldingName
    tensors: Callable[[], Sequence[Tensor]] = lambda: []
    fixed_bytes: int | None = None
    """The bytes of tensors that neither come nor go, counted once: they are asked for many times in a phase."""
    frozen: bool = False
    """Its tensors never change."""
    resident_blocks: list[HostBlock] = field(default_factory=list)
    """Host memory in which a part of it lives in every phase."""
    away: bool = False
    """It is offloaded: its bytes are in `blocks`, and its storages are empty."""
    device_part: Callable[[], int] = lambda: 0
    """The bytes of its parts on the device while it is offloaded and streamed."""
    blocks: list[HostBlock] = field(default_factory=list)
    """Host memory of each storage, while it is offloaded or for the next time."""
    has_final_copy: bool = False
    """It is frozen, and `blocks` have its bytes: offloading it once more copies nothing."""
    last: Move | None = None
    """A move that compute has not waited for yet."""
    readers: list[Lease] = field(default_factory=list)
    being_written: bool = False
    writeback: Move | None = None
    """The last copy into its resident blocks."""

    def storages(self) -> list[torch.UntypedStorage]:
        """The storages of its tensors, each once: several tensors may share one."""
        found = {storage_id(tensor): tensor.untyped_storage() for tensor in self.tensors()}
        return list(found.values())

    @property
    def bytes(self) -> Bytes:
        """Its bytes on the device and on the host."""
        resident = sum(block.size for block in self.resident_blocks)
        if self.away:
            return Bytes(self.device_part(), resident + sum(block.size for block in self.blocks))
        if self.fixed_bytes is not None:
            return Bytes(self.fixed_bytes, resident)
        return Bytes(sum(storage.nbytes() for storage in self.storages()), resident)


@dataclass(eq=False)
class Lease:
    """A reader's lease: its holdings neither move nor change until it is released, at the end of a `with` or by
    `release()`."""

    holdings: Sequence[Holding]
    released: threading.Condition
    thread: int
    copy_first: Callable[[], None] | None
    """A writer that waits for this lease calls it: it may copy what is not read yet, and release."""

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Releases the lease. Any thread may call this, more than once."""
        with self.released:
            for holding in self.holdings:
                if self in holding.readers:
                    holding.readers.remove(self)
            self.released.notify_all()
