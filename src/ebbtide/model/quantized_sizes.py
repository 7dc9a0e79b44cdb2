"""What a quantized matrix (`model.base`) needs. This file imports no torch."""

from __future__ import annotations

import math

from ebbtide.config.model import BaseKind

LARGEST_GROUP, SMALLEST_GROUP = 128, 16
"""Numbers of a row that share a scale, in 4 bits."""


def quantized_bytes(rows: int, columns: int, kind: BaseKind) -> int:
    """The bytes of a matrix with its scales."""
    if kind == "float8":
        return rows * (columns + 2)
    return rows * (columns // 2 + 4 * (columns // math.gcd(columns, LARGEST_GROUP)))
