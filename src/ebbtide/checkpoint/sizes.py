"""How much memory asynchronous saves take. Pure Python, no torch: a plan is made from it before anything is loaded."""

from __future__ import annotations

SLOTS = 2  # tensors in shared memory at once: as many threads write, each its own file


def copied_bytes(weights: int, staying: int, largest: int) -> int:
    """Host memory for copies of what a save finds on the device: so many bytes of weights and of optimizer state; and for what is shared with the process that writes, by the elements of the largest tensor."""
    return weights + staying + SLOTS * 4 * largest
