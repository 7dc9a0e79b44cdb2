"""Names that people bring from other tools (foreign_names.yaml), looked up where a key or a value is not known.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import yaml
from pydantic import BaseModel

from ebbtide.config.serve import Serve


@cache
def _tables() -> Mapping[str, Any]:
    tables: Mapping[str, Any] = yaml.safe_load((resources.files("ebbtide.config") / "foreign_names.yaml").read_text())
    return tables


def names_known(root: type[BaseModel]) -> Mapping[str, str]:
    """Name -> what it is here, for the settings of a run or of the server."""
    names: Mapping[str, str] = _tables()["serve" if root is Serve else "names"]
    return names


def is_foreign(keys: Sequence[str], root: type[BaseModel]) -> bool:
    """Whether another tool has exactly this key: then it is no slip in one of ours, however near that is."""
    return ".".join(map(_plain, keys)) in names_known(root)


def what_it_is_here(keys: Sequence[str], root: type[BaseModel]) -> str | None:
    """A sentence on a foreign key, known whole or by its last parts; or on a section above it that is known."""
    parts, known = [_plain(key) for key in keys], names_known(root)
    for end in range(len(parts), 0, -1):
        for start in range(end):
            if (found := known.get(".".join(parts[start:end]))) is not None:
                return f"{'Here it is ' if found.startswith('`') else ''}{found}."
    return None


def what_to_write(dotted: str, value: object) -> str | None:
    """In place of a value that a key of ours does not take, where people know it."""
    values: Mapping[str, str] = _tables()["values"].get(dotted, {})
    return values.get(_plain(value)) if isinstance(value, str) else None


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
