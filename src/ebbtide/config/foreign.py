"""Names that people know from other tools (foreign_names.yaml), looked up when a key or a value is unknown.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import yaml
from pydantic import BaseModel

from ebbtide.config.keys import all_keys, section_at
from ebbtide.config.serve import ServeConfig

QUOTED = re.compile(r"`([^`]+)`")


@cache
def _tables() -> Mapping[str, Any]:
    tables: Mapping[str, Any] = yaml.safe_load((resources.files("ebbtide.config") / "foreign_names.yaml").read_text())
    return tables


@cache
def foreign_names(root: type[BaseModel]) -> Mapping[str, str]:
    """Foreign name -> its counterpart here, for the settings of a run of this algorithm or of the server."""
    tables = _tables()
    if root is ServeConfig:
        served: Mapping[str, str] = tables["serve"]
        return served
    names: Mapping[str, str] = tables["names"]
    if (own := own_names(root)) is None:
        return names
    # What points to a setting of another algorithm does not hold here, nor does what is a setting of this one.
    keys = set(all_keys(root))
    ours = {key.rsplit(".", 1)[-1] for key in keys}
    return {name: text for name, text in names.items() if name not in ours and _names_only(text, keys)} | dict(own)


def own_names(root: type[BaseModel]) -> Mapping[str, str] | None:
    """The names that mean something else in this algorithm than in GRPO; None for GRPO itself."""
    own: Mapping[str, str] | None = _tables()["algorithms"].get(root.model_fields["algorithm"].default)
    return own


def _names_only(text: str, keys: Collection[str]) -> bool:
    """Whether all settings that a text names are among these keys."""
    quoted = QUOTED.findall(text)
    named = {one.partition("=")[0] for one in quoted if "." in one or "=" in one}
    return named <= set(keys) and (not text.startswith("`") or quoted[0] in keys)


def is_foreign(keys: Sequence[str], root: type[BaseModel]) -> bool:
    """Whether another tool has exactly this key; then it is no typo of one of ours, however similar."""
    return ".".join(map(_plain, keys)) in foreign_names(root)


def find_counterpart(keys: Sequence[str], root: type[BaseModel]) -> str | None:
    """A sentence on a foreign key, matched in full or by its last parts, or on a known section above it that is none of
    ours."""
    parts, known = [_plain(key) for key in keys], foreign_names(root)
    for end in range(len(parts), 0, -1):
        if end < len(parts) and section_at(keys[:end], root) is not None:
            break
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
