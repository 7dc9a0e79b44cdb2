"""The arithmetic of the CPU backend: cpu_kernels.c, compiled once and cached, or the same in torch where there is no C
compiler.

Each call works on many threads, without the GIL.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ebbtide.optim import rule as plain
from ebbtide.optim.rule import Rule

SOURCE = Path(__file__).with_name("cpu_kernels.c")
# Multiplications are not fused with additions (-ffp-contract=off), so that every machine steps to the same bits. (Sums
# of squares are added in vectors of the machine's own width.)
FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fopenmp-simd",
    "-pthread",
    "-shared",
    "-fPIC",
)
KINDS = {torch.float32: 0, torch.bfloat16: 1}
STOCHASTIC = 2


class CpuStepArgs(NamedTuple):
    """The arguments of a step of some elements of one parameter, all on the host: the master is rounded into
    `weight`."""

    master: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor
    weight: Tensor
    rule: Rule
    start: int
    """The first element's position in the parameter."""


class CpuAddArgs(NamedTuple):
    """The arguments of an addition `total += part`."""

    total: Tensor
    part: Tensor | None
    """What is added to the total; None to compute only the total's sum of squares."""
    first: bool = False
    """Overwrites the total with the part."""


class CpuMath(Protocol):
    """Each method returns a function for any thread to call: everything that needs the GIL is done before."""

    compiled: bool
    threads: int

    def step(self, stretches: Sequence[CpuStepArgs]) -> Callable[[], None]:
        """Steps masters and moments by AdamW."""

    def add(self, sums: Sequence[CpuAddArgs]) -> Callable[[], list[float]]:
        """Adds parts to totals; the function returns each total's sum of squares after that."""


class TorchMath:
    """The kernels in torch, for machines without a C compiler."""

    compiled = False

    def __init__(self) -> None:
        self.threads = torch.get_num_threads()

    def step(self, stretches: Sequence[CpuStepArgs]) -> Callable[[], None]:
        def run() -> None:
            for master, grad, first, second, weight, rule, start in stretches:
                plain.adamw(master, grad, first, second, rule, start)
                weight.copy_(master)

        return run

    def add(self, sums: Sequence[CpuAddArgs]) -> Callable[[], list[float]]:
        def run() -> list[float]:
            for total, part, first in sums:
                if part is not None:
                    total.copy_(part if first else total + part)
            return [
                math.fsum(float(block.float().square().sum(dtype=torch.float64)) for block in total.split(2**20))
                for total, *_ in sums
            ]

        return run


class _Rule(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_float)
            for name in ("scale", "shrink", "gain1", "beta2", "gain2", "step_size", "root", "eps")
        ),
        ("start", ctypes.c_uint32),
        ("key", ctypes.c_uint32),
    ]


class _StepStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("begin", "n")),
        *((name, ctypes.c_void_p) for name in ("master", "grad", "first", "second", "weight")),
        *((name, ctypes.c_int) for name in ("grads", "state", "weights")),
        ("rule", _Rule),
    ]


class _AddStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("begin", "n")),
        *((name, ctypes.c_void_p) for name in ("total", "part")),
        *((name, ctypes.c_int) for name in ("totals", "parts", "first")),
        ("sums", ctypes.c_void_p),
    ]


class CMath:
    """The kernels of cpu_kernels.c, on a team of threads of its own."""

    compiled = True

    def __init__(self, library: Path, threads: int) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        loaded = ctypes.CDLL(str(library))
        loaded.team_new.argtypes, loaded.team_new.restype, loaded.team_end.argtypes = [ctypes.c_int], pointer, [pointer]
        self._step, self._add = loaded.adamw, loaded.add
        self._step.argtypes = [pointer, number, pointer]
        self._add.argtypes = [pointer, number, pointer, pointer]
        self.threads = threads
        self._team = loaded.team_new(threads - 1)  # the calling thread is one of them
        weakref.finalize(self, loaded.team_end, self._team).atexit = False  # the threads end with the process anyway

    def step(self, stretches: Sequence[CpuStepArgs]) -> Callable[[], None]:
        job = (_StepStruct * (len(stretches) + 1))(*map(_step_struct, stretches))

        def run() -> None:  # keeps the tensors alive, to whose memory the job points
            self._step(self._team, len(stretches), job)

        return run

    def add(self, sums: Sequence[CpuAddArgs]) -> Callable[[], list[float]]:
        job, squares = (_AddStruct * (len(sums) + 1))(*map(_add_struct, sums)), (ctypes.c_double * len(sums))()

        def run() -> list[float]:  # keeps the tensors alive, to whose memory the job points
            self._add(self._team, len(sums), job, squares)
            return list(squares)

        return run


def _step_struct(stretch: CpuStepArgs) -> _StepStruct:
    master, grad, first, second, weight, rule, start = stretch
    assert grad.dtype in (torch.float32, weight.dtype)  # cpu_kernels.c has no other variant
    beta1, beta2 = rule.config.betas
    numbers = rule.scale, rule.shrink, 1 - beta1, beta2, 1 - beta2, rule.step_size, rule.root, rule.config.eps
    pointers = (tensor.data_ptr() for tensor in (master, grad, first, second, weight))
    state = STOCHASTIC if rule.stochastic else KINDS[first.dtype]
    return _StepStruct(
        0,
        len(master),
        *pointers,
        KINDS[grad.dtype],
        state,
        KINDS[weight.dtype],
        _Rule(*numbers, start & 0xFFFFFFFF, rule.key),
    )


def _add_struct(added: CpuAddArgs) -> _AddStruct:
    total, part, first = added
    assert part is None or total.dtype in (torch.float32, part.dtype)  # cpu_kernels.c has no other variant
    where, kind = (None, 0) if part is None else (part.data_ptr(), KINDS[part.dtype])
    return _AddStruct(0, len(total), total.data_ptr(), where, KINDS[total.dtype], kind, first, None)


def cpu_math(threads: int) -> CpuMath:
    """The compiled kernels on so many threads, or torch's, which choose their own number."""
    library = _compile()
    if library is not None:
        with suppress(OSError):  # a disk mounted noexec, or a library of another machine
            return CMath(library, threads)
    return TorchMath()


@cache
def _compile() -> Path | None:
    """The library for this machine's processor, compiled if it is not in the cache; None without a working compiler."""
    cpu = hashlib.sha256(platform.machine().encode())
    cpu.update(
        "".join(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))
        ).encode()
    )
    cpu.update(" ".join(FLAGS).encode() + SOURCE.read_bytes())
    name = f"native-{cpu.hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "ebbtide"
    if (folder / name).exists():
        return folder / name
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    library = (folder if writable else Path(tempfile.mkdtemp(prefix="ebbtide-"))) / name
    built = library.with_suffix(f".{os.getpid()}")
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(built), "-lm"]
    done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
    if done.returncode != 0:
        return None
    built.replace(library)  # atomically: another process may be doing the same
    return library
