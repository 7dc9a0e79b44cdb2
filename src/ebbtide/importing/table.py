"""The tables that say what each key of another tool is here: `tables/nemo_rl.yaml`, `verl.yaml` and `trl.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from ebbtide.config.yaml_text import read_yaml


@dataclass(frozen=True)
class Entry:
    """What becomes of one key."""

    to: str | None = None
    """The key of Ebbtide that takes its value."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """With `to`: their value, as a text -> ours; a value that is not among them has no counterpart."""
    by: str | None = None
    """What is computed from it, by the functions of the tool's module."""
    not_needed: str | None = None
    """Why nothing has to be set."""
    none: str | None = None
    """The nearest thing to a counterpart that is not there."""
    idle: tuple[Any, ...] = ()
    """With `none`: values, beside null, false and empty ones, at which the key changes nothing."""


@dataclass(frozen=True)
class Table:
    """All that is known of a tool's keys, for one algorithm."""

    name: str
    keys: Mapping[str, Entry]
    sections: Mapping[str, Entry]
    """Entries of whole sections: `a.b` stands for all keys below it that have no entry of their own."""
    defaults: Mapping[str, Any]
    """Their key -> the value that it has where it is not set."""
    implied: Mapping[str, tuple[Any, str]]
    """Our key -> the value that it has in that tool without any key, and why."""
    not_switches: frozenset[str]
    """Keys named `enabled` that do not switch their section off."""

    def find(self, key: str) -> Entry | None:
        """The entry of a key, or of the nearest section that it is in."""
        if key in self.keys:
            return self.keys[key]
        above = key
        while "." in above:
            above = above.rpartition(".")[0]
            if above in self.sections:
                return self.sections[above]
        return None


@cache
def read_table(tool: str, algorithm: str) -> Table:
    """The table of a tool for an algorithm: what holds for all of them, and what the algorithm has of its own."""
    file = resources.files("ebbtide.importing") / "tables" / f"{tool}.yaml"
    tree: Any = read_yaml(file.read_text(), f"{tool}.yaml")
    own = tree["algorithms"].get(algorithm) or {}
    found = {
        name: Entry(**{**entry, "idle": tuple(entry.get("idle", ()))})
        for part in (tree, own)
        for name, entry in (part.get("keys") or {}).items()
    }
    return Table(
        name=tree["name"],
        keys={name: entry for name, entry in found.items() if not name.endswith(".*")},
        sections={name.removesuffix(".*"): entry for name, entry in found.items() if name.endswith(".*")},
        defaults={**(tree.get("defaults") or {}), **(own.get("defaults") or {})},
        implied={
            key: (one["value"], one["why"]) for part in (tree, own) for key, one in (part.get("implied") or {}).items()
        },
        not_switches=frozenset(tree.get("not_switches") or ()),
    )
