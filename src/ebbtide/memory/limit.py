"""The most device memory that a run may have, enforced by the allocator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ebbtide.memory.arena import GIB
from ebbtide.memory.plan import check_budget


@contextmanager
def limited(device: torch.device, budget_gib: float | None) -> Iterator[None]:
    """For the length of a run; on a CPU, and without a budget, nothing is enforced."""
    if device.type != "cuda" or budget_gib is None:
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    check_budget(budget_gib, total / GIB)
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(budget_gib * GIB / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def unused_bytes(device: torch.device) -> int:
    """That a GPU's allocator has at once, within the limit: not what was freed and is still being copied away."""
    free, total = torch.cuda.mem_get_info(device)
    limit = min(free + torch.cuda.memory_reserved(device), torch.cuda.get_per_process_memory_fraction(device) * total)
    return int(limit - torch.cuda.memory_stats(device)["active_bytes.all.current"])


def free_bytes(device: torch.device) -> int:
    """That can still be allocated on a GPU, within the limit."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    here = free + torch.cuda.memory_reserved(device) - allocated
    return int(min(here, torch.cuda.get_per_process_memory_fraction(device) * total - allocated))
