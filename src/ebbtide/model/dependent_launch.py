"""Programmatic dependent launch: what kernels call that are started while the one before them still runs, and wait for
its results where they read them (`starts_early` in model/launch.py). Between two kernels of a decode pass that saves
about a microsecond.

A kernel that is launched so calls `wait_for_results` in each of its programs, also in those that have nothing to do.
Before that it writes nothing, and reads nothing that a kernel of the same pass has written, however long before: each
lets the next one start before it waits itself. What is copied to the device, as the inputs of a pass are, may be read.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
