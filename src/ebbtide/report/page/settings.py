"""config.yaml as a flat list of settings, so that several runs can be compared side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

MOST_SETTINGS = 2_000
"""Ebbtide has about two hundred. A YAML file can contain itself by an alias, and would have infinitely many."""
DEEPEST = 12  # nested levels, for the same reason


def flatten_settings(config: dict[str, Any]) -> dict[str, str]:
    """Maps keys such as `optimizer.lr` to values such as `0.001`, in the order of the file."""
    found = chain.from_iterable(_settings(str(name), value, 0) for name, value in config.items())
    return dict(islice(found, MOST_SETTINGS))


def _settings(key: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
    inside: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        inside = list(enumerate(value))
    if inside and depth < DEEPEST:
        for name, below in inside:
            yield from _settings(f"{key}.{name}", below, depth + 1)
    elif inside:
        yield key, "..."
    else:
        yield key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
