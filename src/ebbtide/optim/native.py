"""The arithmetic of the CPU's share: native.c, compiled once and kept, or the same in torch where there is no C compiler.

Each call works on many threads, and without Python's lock.
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

SOURCE = Path(__file__).with_name("native.c")
# The products are not fused with the sums, so that every machine steps to the same bits. (Sums of squares are added up in the machine's own vectors.)
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


class Stepped(NamedTuple):
    """A stretch of one parameter, all on the host: its master is rounded into `weight`."""

    master: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor
    weight: Tensor
    rule: Rule
    start: int
    """Its first element's place in its parameter."""


class Added(NamedTuple):
    total: Tensor
    part: Tensor | None
    """What is added to it; where there is none, its squares are asked for alone."""
    first: bool = False
    """The total is the part then, whatever it was."""


class Arithmetic(Protocol):
    """Each gives a function, for any thread to call: all that takes Python's lock is done before."""

    compiled: bool
    threads: int

    def step(self, stretches: Sequence[Stepped]) -> Callable[[], None]:
        """AdamW on masters and moments."""

    def add(self, sums: Sequence[Added]) -> Callable[[], list[float]]:
        """Adds up; the function gives the sum of each total's squares then."""


class Torch:
    compiled = False

    def __init__(self) -> None:
        self.threads = torch.get_num_threads()

    def step(self, stretches: Sequence[Stepped]) -> Callable[[], None]:
        def run() -> None:
            for master, grad, first, second, weight, rule, start in stretches:
                plain.adamw(master, grad, first, second, rule, start)
                weight.copy_(master)

        return run

    def add(self, sums: Sequence[Added]) -> Callable[[], list[float]]:
        def run() -> list[float]:
            for total, part, first in sums:
                if part is not None:
                    total.copy_(part if first else total + part)
            return [math.fsum(float(block.float().square().sum(dtype=torch.float64)) for block in total.split(2**20)) for total, *_ in sums]

        return run


class _Rule(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_float) for name in ("scale", "shrink", "gain1", "beta2", "gain2", "step_size", "root", "eps")),
        ("start", ctypes.c_uint32),
        ("key", ctypes.c_uint32),
    ]


class _Stepped(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("begin", "n")),
        *((name, ctypes.c_void_p) for name in ("master", "grad", "first", "second", "weight")),
        *((name, ctypes.c_int) for name in ("grads", "state", "weights")),
        ("rule", _Rule),
    ]


class _Added(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("begin", "n")),
        *((name, ctypes.c_void_p) for name in ("total", "part")),
        *((name, ctypes.c_int) for name in ("totals", "parts", "first")),
        ("sums", ctypes.c_void_p),
    ]


class Native:
    compiled = True

    def __init__(self, library: Path, threads: int) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        loaded = ctypes.CDLL(str(library))
        loaded.team_new.argtypes, loaded.team_new.restype, loaded.team_end.argtypes = [ctypes.c_int], pointer, [pointer]
        self._step, self._add = loaded.adamw, loaded.add
        self._step.argtypes = [pointer, number, pointer]
        self._add.argtypes = [pointer, number, pointer, pointer]
        self.threads = threads
        self._team = loaded.team_new(threads - 1)  # the caller's is one of them
        weakref.finalize(self, loaded.team_end, self._team).atexit = False  # the system ends its threads with the process

    def step(self, stretches: Sequence[Stepped]) -> Callable[[], None]:
        job = (_Stepped * (len(stretches) + 1))(*map(_stepped, stretches))

        def run() -> None:  # keeps the stretches, to whose memory the job points
            self._step(self._team, len(stretches), job)

        return run

    def add(self, sums: Sequence[Added]) -> Callable[[], list[float]]:
        job, squares = (_Added * (len(sums) + 1))(*map(_added, sums)), (ctypes.c_double * len(sums))()

        def run() -> list[float]:  # keeps the tensors, to whose memory the job points
            self._add(self._team, len(sums), job, squares)
            return list(squares)

        return run


def _stepped(stretch: Stepped) -> _Stepped:
    master, grad, first, second, weight, rule, start = stretch
    assert grad.dtype in (torch.float32, weight.dtype)  # native.c has no other
    beta1, beta2 = rule.config.betas
    numbers = rule.scale, rule.shrink, 1 - beta1, beta2, 1 - beta2, rule.step_size, rule.root, rule.config.eps
    pointers = (tensor.data_ptr() for tensor in (master, grad, first, second, weight))
    state = STOCHASTIC if rule.stochastic else KINDS[first.dtype]
    return _Stepped(0, len(master), *pointers, KINDS[grad.dtype], state, KINDS[weight.dtype], _Rule(*numbers, start & 0xFFFFFFFF, rule.key))


def _added(added: Added) -> _Added:
    total, part, first = added
    assert part is None or total.dtype in (torch.float32, part.dtype)  # native.c has no other
    where, kind = (None, 0) if part is None else (part.data_ptr(), KINDS[part.dtype])
    return _Added(0, len(total), total.data_ptr(), where, KINDS[total.dtype], kind, first, None)


def arithmetic(threads: int) -> Arithmetic:
    """On so many threads; torch has as many as it wants."""
    library = _compiled()
    if library is not None:
        with suppress(OSError):  # a disk that nothing is run from, or a library of another machine's
            return Native(library, threads)
    return Torch()


@cache
def _compiled() -> Path | None:
    """The library for this machine's processor, compiled if it is not there yet; None without a compiler that works."""
    cpu = hashlib.sha256(platform.machine().encode())
    cpu.update("".join(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))).encode())
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
    made = library.with_suffix(f".{os.getpid()}")
    done = subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(made), "-lm"], capture_output=True, check=False)  # noqa: S603
    if done.returncode != 0:
        return None
    made.replace(library)  # at once: another process may be doing the same
    return library
