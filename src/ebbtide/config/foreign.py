"""Names that people know from other tools (foreign_names.yaml), looked up when a key or a value is unknown.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import yaml
from pydantic import BaseModel

from ebbtide.config.serve import ServeConfig


@cache
def _tables() -> Mapping[str, Any]:
    tables: Mapping[str, Any] = yaml.safe_load((resources.files("ebbtide.config") / "foreign_names.yaml").read_text())
    return tables


def foreign_names(root: type[BaseModel]) -> Mapping[str, str]:
    """Foreign name -> its counterpart here, for the settings of a run or of the server."""
    names: Mapping[str, str] = _tables()["serve" if root is ServeConfig else "names"]
    return names


def is_foreign(keys: Sequence[str], root: type[BaseModel]) -> bool:
    """Whether another tool has exactly this key; then it is no typo of one of ours, however similar."""
    return ".".join(map(_plain, keys)) in foreign_names(root)


def find_counterpart(keys: Sequence[str], root: type[BaseModel]) -> str | None:
    """A sentence on a foreign key, matched in full or by its last parts, or on a known section above it."""
    parts, known = [_plain(key) for key in keys], foreign_names(root)
    for end in range(len(parts), 0, -1):
        for start in range(end):
            if (found := known.get(".".join(parts[start:end]))) is not None:
                return f"{'Here it is ' if found.startswith('`') else ''}{found}."
    return None


def find_value_advice(dotted: str, value: object) -> str | None:
    """Advice on a value of another tool that our key does not accept."""
    values: Mapping[str, str] = _tables()["values"].get(dotted, {})
    return values.get(_plain(value)) if isinstance(value, str) else None


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
