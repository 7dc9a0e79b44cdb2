"""Programmatic dependent launch, on Hopper GPUs and later ones: a kernel is started while the one before it still runs,
and waits for its results where it reads them. Between two kernels of a decode pass that saves about a microsecond.

A kernel that is launched so calls `wait_for_results` in each of its programs, also in those that have nothing to do.
Before that it writes nothing, and reads only what none of the kernels right before it has written: the inputs of a
pass, which are copied and not computed.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.system.gpu import HOPPER, generation


@triton.jit
def wait_for_results(early: tl.constexpr):
    """Waits until the kernel before this one has ended. The one after it may start from here on."""
    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def load_into_cache(place, early: tl.constexpr):
    """Asks for the 512 bytes from each address on, which are read after the wait: they move into the L2 cache
    meanwhile. `place`: addresses as int64."""
    if early:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 512; mov.u32 $0, 0;",
            "=r,l",
            [place],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def starts_early(tensor: Tensor) -> bool:
    """Whether kernels are launched so on the device of a tensor."""
    return tensor.is_cuda and _starts_early(tensor.device)


@cache
def _starts_early(device: torch.device) -> bool:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # It runs one kernel after another, and has no such calls.
    return not interpreted and torch.version.hip is None and generation(device) >= HOPPER


def launch_options(early: bool) -> dict[str, Any]:
    """The options of the launch."""
    return {"launch_pdl": True} if early else {}
