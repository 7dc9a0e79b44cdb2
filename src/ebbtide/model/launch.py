"""Launches of Triton kernels: early ones (model/dependent_launch.py), and such that take the host less time, which is
what a small model waits for.

`kernel[grid](...)` finds out at each launch which compiled kernel its arguments ask for. Here what decides that is
compared with earlier launches, and the compiled kernel is launched itself: a residual add with its norm takes the host
of an H200 30 us instead of 43.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ebbtide.system.gpu import HOPPER, generation


def starts_early(tensor: Tensor) -> bool:
    """Whether kernels on the device of a tensor are started while the ones before them run: on GPUs since Hopper."""
    return tensor.is_cuda and _starts_early(tensor.device)


@cache
def _starts_early(device: torch.device) -> bool:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # It runs one kernel after another, and has no such calls.
    return not interpreted and generation(device) >= HOPPER


def launch_options(early: bool) -> dict[str, Any]:
    """The options of the launch."""
    return {"launch_pdl": True} if early else {}


class Launcher:
    """A Triton kernel whose parameters are tensors, then numbers, then constants. It is compiled for none of the
    numbers: integers must be among its `do_not_specialize`."""

    def __init__(self, kernel: Any, *, dependent: bool = False, joins: bool = False, **options: Any) -> None:
        """`dependent`: its last constant tells whether it is started early, and is added here. `joins`: it needs what a
        branch of a graph has written, too (system/side_stream.py), and is not started early itself, as what it would
        wait for then is not documented; the one after it is."""
        self._kernel, self._dependent, self._joins, self._options = kernel, dependent, joins, options
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(
        self, programs: int, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], *constants: int, warps: int
    ) -> None:
        early = self._dependent and starts_early(tensors[0])
        if self._dependent:
            constants = *constants, early
        kinds = tuple([(tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors])
        key = (tensors[0].device, warps, constants, kinds)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[programs, 1, 1](*tensors, *numbers, *constants)
            return
        options = self._options | launch_options(early and not self._joins)
        launched = self._kernel[(programs,)](*tensors, *numbers, *constants, num_warps=warps, **options)
        if tensors[0].is_cuda:  # and not Triton's interpreter, in the tests
            self._compiled[key] = launched
