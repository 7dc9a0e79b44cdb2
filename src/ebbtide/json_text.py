"""JSON that every reader takes: without NaN and infinities, which Python writes. Imports no torch."""

from __future__ import annotations

import json
import math
from typing import Any

DEEPEST = 100  # lists and mappings inside each other; readers and writers take a thousand or less


def json_text(value: Any, **options: Any) -> str:
    """A number that is not finite becomes null, what JSON has no form for its text."""
    options = {"ensure_ascii": False, "allow_nan": False, **options}
    try:
        return json.dumps(value, **options)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_plain(value, 0), **options)


def json_bytes(value: Any, **options: Any) -> bytes:
    """In UTF-8; half of a pair of surrogates is as JSON itself would write it."""
    return json_text(value, **options).encode(errors="backslashreplace")


def too_deep(row: Any) -> bool:
    """More than DEEPEST lists and mappings of a row are inside each other."""
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
    except Exception:  # noqa: BLE001 (foreign code: what a task has for an answer is no reason to lose its line)
        return f"<{type(value).__name__}>"
