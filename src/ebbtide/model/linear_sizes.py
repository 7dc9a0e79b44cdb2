"""Which columns of a matmul are multiplied apart (linear.py). Imports no torch."""

from __future__ import annotations

ALIGNED = 8  # columns: cuBLAS has other kernels for widths that are no multiple, which are slower and have other bits
NARROW = 1024  # columns: narrower products of such widths are one kernel of ours


def last_columns(width: int) -> int:
    """How many columns at the end of a product are multiplied by a kernel of ours, and copied next to the others."""
    return width % ALIGNED if width >= NARROW else 0
