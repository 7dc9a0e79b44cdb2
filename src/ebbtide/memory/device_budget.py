"""The device memory budget of a run, enforced by the allocator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ebbtide.memory.plan import check_device_budget
from ebbtide.system.units import GIB, gib


@contextmanager
def enforce_budget(device: torch.device, budget_gib: float | None) -> Iterator[None]:
    """Limits the allocator to the budget for the length of a run; on a CPU, or without a budget, does nothing."""
    if device.type != "cuda" or budget_gib is None:
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    check_device_budget(budget_gib, gib(total))
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(budget_gib * GIB / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def release_cache(device: torch.device) -> None:
    """Gives memory that torch's allocator keeps for tensors of the sizes it had back to the GPU, which is for moments
    after which the sizes are others; on a CPU, does nothing."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def unused_bytes(device: torch.device) -> int:
    """The bytes that can be allocated on a GPU at once, within the budget. Memory that was freed but is still being
    copied to the host does not count."""
    free, total = torch.cuda.mem_get_info(device)
    limit = min(free + torch.cuda.memory_reserved(device), torch.cuda.get_per_process_memory_fraction(device) * total)
    return int(limit - torch.cuda.memory_stats(device)["active_bytes.all.current"])


def free_bytes(device: torch.device) -> int:
    """The bytes that can still be allocated on a GPU, within the budget."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    here = free + torch.cuda.memory_reserved(device) - allocated
    return int(min(here, torch.cuda.get_per_process_memory_fraction(device) * total - allocated))


def held_unused_bytes(device: torch.device) -> int:
    """The bytes that torch's allocator holds on a GPU and that no tensor has; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
