"""Cores that may be used, and those near a GPU, from what the system says."""

import gc
import os
import subprocess
import sys

import pytest

from ebbtide.memory.host import bind_to_numa_node, free_host_bytes, frozen_gc, numa_cores, usable_cores


@pytest.fixture
def system(tmp_path):
    """A host of two nodes, with a GPU on the second."""
    for node, cores in ((0, "1000-1007"), (1, f"{min(os.sched_getaffinity(0))},2000-2003")):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{node}/cpulist").write_text(f"{cores}\n")
    (tmp_path / "bus/pci/devices/0000:1b:00.0").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:1b:00.0/numa_node").write_text("1\n")
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    return tmp_path


def test_a_quota_counts(system) -> None:
    allowed = len(os.sched_getaffinity(0))
    assert usable_cores(system) == allowed
    for text, cores in (
        ("max 100000", allowed),
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("9900000 100000", allowed),
    ):
        (system / "fs/cgroup/cpu.max").write_text(text)
        assert usable_cores(system) == cores


def group(folder, **files) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_memory_that_is_free(system, tmp_path) -> None:
    """The least that any group on the way up leaves, files in memory not counted."""
    process, root = tmp_path / "proc", system / "fs/cgroup"
    group(process, meminfo="MemTotal: 9000 kB\nMemAvailable:   8000 kB\n")
    group(process / "self", cgroup="0::/user.slice/job\n")
    assert free_host_bytes(system, process) == 8000 * 1024
    group(
        root / "user.slice",
        memory__max="600000",
        memory__current="500000",
        memory__stat="anon 1\ninactive_file 450000\n",
    )
    group(root / "user.slice/job", memory__max="max", memory__current="500000", memory__stat="inactive_file 450000\n")
    assert free_host_bytes(system, process) == 550_000
    group(root / "user.slice/job", memory__max="520000")
    assert free_host_bytes(system, process) == 470_000
    group(process / "self", cgroup="0::/elsewhere/than/in/this/container\n")
    assert free_host_bytes(system, process) == 8000 * 1024
    group(root, memory__max="300000", memory__current="200000", memory__stat="inactive_file 0\n")
    assert free_host_bytes(system, process) == 100_000


def test_memory_that_is_free_in_groups_of_version_1(system, tmp_path) -> None:
    process, root = tmp_path / "proc", system / "fs/cgroup/memory"
    group(process, meminfo="MemAvailable:   8000 kB\n")
    group(process / "self", cgroup="5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n")
    figures = {"memory__usage_in_bytes": "500000", "memory__stat": "inactive_file 9\ntotal_inactive_file 450000\n"}
    group(root / "job", memory__limit_in_bytes="600000", **figures)
    group(root, memory__limit_in_bytes=str(2**63 - 4096), **figures)
    assert free_host_bytes(system, process) == 550_000


def test_cores_near_the_gpu(system) -> None:
    node, nodes, cores = numa_cores("0000:1B:00.0", system)
    assert (node, nodes) == (1, 2)
    assert cores == {min(os.sched_getaffinity(0)), 2000, 2001, 2002, 2003}
    assert numa_cores("0000:99:00.0", system) is None
    (system / "bus/pci/devices/0000:1b:00.0/numa_node").write_text("-1\n")
    assert numa_cores("0000:1b:00.0", system) is None


def test_one_node_needs_no_binding(system) -> None:
    (system / "devices/system/node/node0/cpulist").unlink()
    (system / "devices/system/node/node0").rmdir()
    assert numa_cores("0000:1b:00.0", system) is None
    assert bind_to_numa_node("0000:1b:00.0", system) is None


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be narrowed")
def test_binding_keeps_all_threads_near_and_says_so(system) -> None:
    code = (
        "import os, sys, threading\nfrom pathlib import Path\nfrom ebbtide.memory.host import bind_to_numa_node\n"
        "go = threading.Event(); other = threading.Thread(target=go.wait); other.start()\n"
        "print(bind_to_numa_node('0000:1B:00.0', Path(sys.argv[1])))\n"
        "print(len(os.sched_getaffinity(0)), len(os.sched_getaffinity(other.native_id)))\ngo.set()"
    )
    said, cores = subprocess.run(
        [sys.executable, "-c", code, str(system)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert said == "NUMA: host threads and memory on node 1 of 2, near the GPU (1 cores)"
    assert cores == "1 1"


def test_what_is_there_is_left_out_of_searches_for_garbage() -> None:
    before = gc.get_freeze_count()
    with frozen_gc():
        assert gc.get_freeze_count() > before + 1000
    assert gc.get_freeze_count() == 0
