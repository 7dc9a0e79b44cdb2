"""Resolves `${...}` as OmegaConf does: keys of the same tree, absolute or relative, and a few functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ebbtide.config.yaml_text import read_yaml
from ebbtide.errors import UserError
from ebbtide.importing.source import Unread

DEEPEST = 32  # interpolations inside each other; more of them refer to each other in a circle
INNERMOST = re.compile(r"\$\{([^${}]*)\}")

FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "floordiv": lambda a, b: a // b,
    "max": max,
    "min": min,
}


def resolve(tree: dict[str, Any], where: str, *, complete: bool = True) -> dict[str, Any]:
    """The tree with all interpolations replaced by their values. `complete`: the tree has all keys that it refers to;
    otherwise a reference to a key that is not there is a value that cannot be read."""
    resolved = _Resolver(tree, where, complete).value(tree, (), 0)
    assert isinstance(resolved, dict)
    return resolved


class _Resolver:
    def __init__(self, tree: dict[str, Any], where: str, complete: bool) -> None:
        self.tree, self.where, self.complete = tree, where, complete

    def value(self, value: Any, path: tuple[str, ...], depth: int) -> Any:
        if isinstance(value, dict):
            return {key: self.value(one, (*path, key), depth) for key, one in value.items()}
        if isinstance(value, list):
            return [self.value(one, (*path, str(place)), depth) for place, one in enumerate(value)]
        return self._text(value, path, depth) if isinstance(value, str) and "${" in value else value

    def _text(self, text: str, path: tuple[str, ...], depth: int) -> Any:
        if depth > DEEPEST:
            raise UserError(f"{self.where}: `{'.'.join(path)}: {text}` refers to itself, by way of other keys or not")
        while (found := INNERMOST.search(text)) is not None:
            value = self._one(found[1], path, depth)
            if found[0] == text or isinstance(value, Unread):
                return value if found[0] == text else Unread(text)
            text = text[: found.start()] + ("null" if value is None else str(value)) + text[found.end() :]
        return text

    def _one(self, inside: str, path: tuple[str, ...], depth: int) -> Any:
        """The value of `${inside}`."""
        name, colon, rest = inside.partition(":")
        if not colon:
            return self._key(inside.strip(), path, depth)
        arguments = [one.strip() for one in rest.split(",")]
        if name == "oc.env":
            return self._literal(arguments[1]) if len(arguments) > 1 else Unread(f"${{{inside}}}")
        if name == "oc.select":
            default = self._literal(arguments[1]) if len(arguments) > 1 else None
            return self._key(arguments[0], path, depth, default)
        if name not in FUNCTIONS or len(arguments) < 2:
            return Unread(f"${{{inside}}}")
        return self._call(name, inside, [self._literal(one) for one in arguments], path)

    def _call(self, name: str, inside: str, values: Sequence[Any], path: tuple[str, ...]) -> Any:
        if any(isinstance(value, Unread) for value in values):
            return Unread(f"${{{inside}}}")
        result = values[0]
        try:
            for value in values[1:]:
                result = FUNCTIONS[name](result, value)
        except (TypeError, ArithmeticError) as error:
            raise UserError(f"{self.where}: `{'.'.join(path)}`: `${{{inside}}}` cannot be computed: {error}") from None
        return result

    def _key(self, name: str, path: tuple[str, ...], depth: int, *default: Any) -> Any:
        dots = len(name) - len(name.lstrip("."))
        start = path[: max(0, len(path) - dots)] if dots else ()
        keys = (*start, *[key for key in name.lstrip(".").split(".") if key])
        node: Any = self.tree
        for key in keys:
            if isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            elif isinstance(node, dict) and key in node:
                node = node[key]
            elif default:
                return default[0]
            elif not self.complete:
                return Unread(f"${{{name}}}")
            else:
                raise UserError(
                    f"{self.where}: `{'.'.join(path)}` refers to `${{{name}}}`, and there is no `{'.'.join(keys)}`"
                )
        return self.value(node, keys, depth + 1)

    def _literal(self, text: str) -> Any:
        return read_yaml(text.strip("'\""), self.where) if text else ""
