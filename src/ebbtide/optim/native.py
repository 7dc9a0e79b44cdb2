"""The arithmetic of the CPU's share: native.c, compiled once and kept, or the same in torch where there is no C compiler.

Each call works on the caller's thread alone, without Python's lock: many threads call it at once.
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
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ebbtide.optim import rule as plain
from ebbtide.optim.rule import Rule

SOURCE = Path(__file__).with_name("native.c")
# The products are not fused with the sums, so that every machine steps to the same bits. (Sums of squares are added up in the machine's own vectors.)
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fopenmp-simd", "-shared", "-fPIC")
KINDS = {torch.float32: 0, torch.bfloat16: 1}
STOCHASTIC = 2


class Arithmetic(Protocol):
    parallel: bool
    """Many threads may call at once; otherwise each call uses torch's own threads."""

    def step(self, master: Tensor, grad: Tensor, first: Tensor, second: Tensor, weight: Tensor, rule: Rule, start: int) -> None:
        """AdamW on a master and its moments, and the master rounded into the weight."""

    def add(self, total: Tensor, part: Tensor, first: bool) -> None:
        """`total` = `part`, or the sum of both."""

    def sum_of_squares(self, x: Tensor) -> float: ...


class Torch:
    parallel = False

    def step(self, master: Tensor, grad: Tensor, first: Tensor, second: Tensor, weight: Tensor, rule: Rule, start: int) -> None:
        plain.adamw(master, grad, first, second, rule, start)
        weight.copy_(master)

    def add(self, total: Tensor, part: Tensor, first: bool) -> None:
        if first:
            total.copy_(part)
        else:
            total += part

    def sum_of_squares(self, x: Tensor) -> float:
        return math.fsum(float(block.float().square().sum(dtype=torch.float64)) for block in x.split(2**20))


class _Rule(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_float) for name in ("scale", "shrink", "gain1", "beta2", "gain2", "step_size", "root", "eps")),
        ("start", ctypes.c_uint32),
        ("key", ctypes.c_uint32),
    ]


class Native:
    parallel = True

    def __init__(self, library: Path) -> None:
        pointer, number, kind = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        loaded = ctypes.CDLL(str(library))
        self._step, self._add, self._squares = loaded.adamw, loaded.add, loaded.sum_of_squares
        self._step.argtypes = [number, pointer, pointer, kind, pointer, pointer, kind, pointer, kind, ctypes.POINTER(_Rule)]
        self._add.argtypes = [number, pointer, kind, pointer, kind, kind]
        self._squares.argtypes, self._squares.restype = [number, pointer, kind], ctypes.c_double

    def step(self, master: Tensor, grad: Tensor, first: Tensor, second: Tensor, weight: Tensor, rule: Rule, start: int) -> None:
        beta1, beta2 = rule.config.betas
        numbers = rule.scale, rule.shrink, 1 - beta1, beta2, 1 - beta2, rule.step_size, rule.root, rule.config.eps
        self._step(
            len(master),
            master.data_ptr(),
            *_where(grad),
            first.data_ptr(),
            second.data_ptr(),
            STOCHASTIC if rule.stochastic else KINDS[first.dtype],
            *_where(weight),
            _Rule(*numbers, start & 0xFFFFFFFF, rule.key),
        )

    def add(self, total: Tensor, part: Tensor, first: bool) -> None:
        self._add(len(total), *_where(total), *_where(part), first)

    def sum_of_squares(self, x: Tensor) -> float:
        return float(self._squares(len(x), *_where(x)))


def _where(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), KINDS[tensor.dtype]


@cache
def arithmetic() -> Arithmetic:
    library = _compiled()
    return Native(library) if library else Torch()


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
