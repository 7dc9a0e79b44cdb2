"""The host memory that asynchronous saves need. Imports no torch: a plan is made before anything is loaded."""

from __future__ import annotations

SAVE = "save"
"""The phase in which a checkpoint is taken."""
SLOTS = 2  # tensors in shared memory at once: one for each thread that writes, each to its own file


def copied_bytes(weights: int, staying: int, largest: int) -> int:
    """The host memory for copies of what a save finds on the device (`weights` bytes of weights, `staying` bytes of
    optimizer state), and for the memory shared with the writer process (`largest` elements per slot)."""
    return weights + staying + SLOTS * 4 * largest
