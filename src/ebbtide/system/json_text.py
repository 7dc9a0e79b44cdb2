"""JSON that every reader accepts: without the NaN and infinities that Python writes. Imports no torch."""

from __future__ import annotations

import json
import math
from typing import Any

DEEPEST = 100  # nested lists and mappings; readers and writers accept a thousand or less


def json_text(value: Any, **options: Any) -> str:
    """The value as JSON. A number that is not finite becomes null, and a type that JSON lacks becomes its `str`."""
    options = {"ensure_ascii": False, "allow_nan": False, **options}
    try:
        return json.dumps(value, **options)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_plain(value, 0), **options)


def json_bytes(value: Any, **options: Any) -> bytes:
    """The value as JSON in UTF-8; an unpaired surrogate is written as its JSON escape."""
    return json_text(value, **options).encode(errors="backslashreplace")


def is_too_deep(row: Any) -> bool:
    """Whether lists and mappings of a row are nested deeper than DEEPEST."""
    level, depth = [row], 0
    while level and depth <= DEEPEST:
        inside = [below for one in level for below in (one.values() if isinstance(one, dict) else one)]
        level, depth = [below for below in inside if isinstance(below, dict | list | tuple)], depth + 1
    return bool(level)


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict | list | tuple) and depth >= DEEPEST:
        return "…"
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _plain(below, depth + 1) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(below, depth + 1) for below in value]
    try:
        return str(value)
    except Exception:  # noqa: BLE001 (foreign code: a line is not lost because of one value)
        return f"<{type(value).__name__}>"
