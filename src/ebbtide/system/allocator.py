"""How torch's allocator takes memory from a GPU. Imports no torch."""

from __future__ import annotations

import os


def use_expandable_segments() -> None:
    """Has to be called before torch first allocates on a GPU. With expandable segments, phases of different sizes do
    not fragment the allocator's memory; without them, plans for small budgets run out of it."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
