"""Conversion to GiB, and integer division that rounds up."""

from __future__ import annotations

GIB = 2**30


def gib(size: float) -> float:
    """Converts bytes to GiB."""
    return size / GIB


def ceil_div(whole: int, part: int) -> int:
    """The number of parts of this size that cover the whole: division rounded up."""
    return -(-whole // part)
