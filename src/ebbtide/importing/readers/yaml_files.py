"""Reads a YAML config whose `defaults:` name the files that it changes, as those of NeMo RL and of Hydra do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ebbtide.config.yaml_text import read_yaml
from ebbtide.errors import UserError
from ebbtide.importing.readers.interpolation import resolve
from ebbtide.importing.source import Found, flatten

LONGEST_CHAIN = 32
OVERRIDE = "_override_"


@dataclass
class Layers:
    """A tree made of several files, and the place of each of its keys."""

    tree: dict[str, Any]
    places: dict[str, str]
    missing: list[str]
    """Files that `defaults` name and that are not there, which only Hydra's search path would find."""

    def found(self, where: str) -> dict[str, Found]:
        """The values under their dotted keys, with interpolations resolved."""
        tree = resolve(self.tree, where, complete=not self.missing)
        return {key: Found(value, self._place(key)) for key, value in flatten(tree)}

    def _place(self, key: str) -> str:
        """The place of a key, or of the nearest section above it that has one, as where an alias stands for it."""
        while key not in self.places and "." in key:
            key = key.rpartition(".")[0]
        return self.places.get(key, "")

    def set(self, key: str, value: Any, place: str) -> None:
        """Sets a dotted key, as a command line does."""
        *above, last = key.split(".")
        node = self.tree
        for one in above:
            below = node.get(one)
            if not isinstance(below, dict):
                below = node[one] = {}
            node = below
        node[last] = value
        self.places[key] = place

    def remove(self, key: str) -> None:
        *above, last = key.split(".")
        node: Any = self.tree
        for one in above:
            node = node.get(one, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict):
            node.pop(last, None)


def read_layers(path: Path, *, strict: bool = True, above: tuple[Path, ...] = ()) -> Layers:
    """The file with all that its `defaults` name. `strict`: one that is not there is an error."""
    if path in above or len(above) > LONGEST_CHAIN:
        raise UserError(f"{path}: its `defaults` name a file that names it in turn")
    tree, lines = _read_file(path)
    named = tree.pop("defaults", None)
    for key in ("_global_", "hydra"):
        tree.pop(key, None)
    layers = Layers({}, {}, [])
    for name in _names(named, path):
        base = _find(name, path.parent)
        if base is not None:
            below = read_layers(base, strict=strict, above=(*above, path))
            layers.missing += below.missing
            _merge(layers.tree, below.tree)
            layers.places |= below.places
        elif strict:
            raise UserError(f"{path}: its `defaults` name `{name}`, and there is no such file beside it: check it out")
        else:
            layers.missing.append(name)
    _merge(layers.tree, tree)
    layers.places |= {key: f"{path.name}:{line}" for key, line in lines.items()}
    return layers


def read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    text = read_text(path)
    tree = read_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise UserError(f"{path} must contain `key: value` lines to be imported")
    node = yaml.compose(text, Loader=yaml.SafeLoader)  # Only nodes with their lines: no value is constructed.
    return tree, dict(_lines(node)) if isinstance(node, yaml.MappingNode) else {}


def _lines(node: yaml.MappingNode, above: str = "") -> Iterator[tuple[str, int]]:
    for key, value in node.value:
        name = f"{above}{key.value}"
        yield name, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _lines(value, f"{name}.")


def _names(named: Any, path: Path) -> list[str]:
    """What `defaults` names; `_self_` and a group of Hydra that is chosen by name have no file of their own here."""
    found = named if isinstance(named, list) else [] if named is None else [named]
    if any(not isinstance(one, str | dict) for one in found):
        raise UserError(f"{path}: `defaults` must be the name of a file, or a list of names")
    return [one for one in found if isinstance(one, str) and one != "_self_"]


def _find(name: str, folder: Path) -> Path | None:
    for candidate in (folder / name, folder / f"{name}.yaml"):
        if candidate.is_file():
            return candidate.resolve()
    return None


def _merge(into: dict[str, Any], tree: dict[str, Any]) -> None:
    """Sets all that `tree` has. A section with `_override_: true` replaces the one that is there."""
    for key, value in tree.items():
        if isinstance(value, dict):
            below = into.get(key)
            if value.get(OVERRIDE) is True or not isinstance(below, dict):
                below = into[key] = {}
            _merge(below, {name: one for name, one in value.items() if name != OVERRIDE})
        elif key != OVERRIDE:
            into[key] = value
