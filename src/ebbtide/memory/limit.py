"""The most device memory that a run may have, enforced by the allocator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ebbtide.errors import UserError

GIB = 2**30


@contextmanager
def limited(device: torch.device, budget_gib: float | None) -> Iterator[None]:
    """For the length of a run; on a CPU, and without a budget, nothing is enforced."""
    if device.type != "cuda" or budget_gib is None:
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if budget_gib * GIB > total:
        raise UserError(
            f"`memory.budget_gib: {budget_gib:g}` is more than the {total / GIB:.1f} GiB that the device has: lower it, or remove it"
        )
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(budget_gib * GIB / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def free_bytes(device: torch.device) -> int:
    """That can still be allocated on a GPU, within the limit."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    here = free + torch.cuda.memory_reserved(device) - allocated
    return int(min(here, torch.cuda.get_per_process_memory_fraction(device) * total - allocated))
