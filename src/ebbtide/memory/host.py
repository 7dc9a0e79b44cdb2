"""The host: the cores and the memory that this process may use, the cores near the GPU, and Python's own memory."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

SYSTEM, PROCESS = Path("/sys"), Path("/proc")


def usable_cores(system: Path = SYSTEM) -> int:
    """The cores that this process may keep busy: its affinity, or fewer by a cgroup's quota, divided among the ranks
    on this machine."""
    cores = len(os.sched_getaffinity(0))
    limit = system / "fs/cgroup/cpu.max"
    if limit.exists():
        quota, period = limit.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return max(1, cores // local_world_size())


def local_world_size() -> int:
    """The number of this run's ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def free_host_bytes(system: Path = SYSTEM, process: Path = PROCESS) -> int:
    """The host memory that this process may still allocate: the machine's free memory, or less by the limit of a cgroup
    that it is in. The page cache counts as free."""
    known = dict(line.split(":") for line in (process / "meminfo").read_text().splitlines())
    free = int(known["MemAvailable"].split()[0]) * 1024
    for line in (process / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = system / "fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):  # version 1
            root = system / "fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        place = root / path.lstrip("/")  # in a container the path may be the host's, while the root is the container's
        for group in (place, *place.parents[: len(place.relative_to(root).parts)]):
            free = min(free, _free_in(group, *names))
    return free


def _free_in(group: Path, limit: str, used: str, cached: str) -> int:
    try:
        text = (group / limit).read_text().strip()
        if text == "max":
            return sys.maxsize
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(text) - int((group / used).read_text()) + int(statistics.get(cached, 0))
    except FileNotFoundError:  # the root cgroup has no limit
        return sys.maxsize


def pci_address(device: torch.device) -> str:
    """The PCI address of a GPU, as sysfs writes it."""
    properties: Any = torch.cuda.get_device_properties(device)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def numa_cores(address: str, system: Path = SYSTEM) -> tuple[int, int, set[int]] | None:
    """(NUMA node of the GPU, number of nodes, cores of that node), or None where the host has one node or sysfs
    does not say."""
    nodes = sorted((system / "devices/system/node").glob("node[0-9]*"))
    place = system / "bus/pci/devices" / address.lower() / "numa_node"
    if len(nodes) < 2 or not place.exists():
        return None
    node = int(place.read_text())
    listed = system / f"devices/system/node/node{node}/cpulist"
    return (node, len(nodes), _numbers(listed.read_text())) if listed.exists() else None


def bind_to_numa_node(address: str, system: Path = SYSTEM) -> str | None:
    """On a host with several NUMA nodes, binds all threads to the GPU's node, so that the memory they touch first is
    there too. Returns a note of what it did."""
    near = numa_cores(address, system)
    allowed = os.sched_getaffinity(0)
    if near is None or not (cores := near[2] & allowed) or cores == allowed:
        return None
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # the thread has ended meanwhile
            os.sched_setaffinity(int(thread), cores)
    return f"NUMA: host threads and memory on node {near[0]} of {near[1]}, near the GPU ({len(cores)} cores)"


def _numbers(text: str) -> set[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Freezes what exists now out of Python's garbage collection: with a model's modules loaded, a collection takes a
    third of a second in the middle of a step."""
    gc.collect()  # once: garbage that exists now would be frozen as well, and stay
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
