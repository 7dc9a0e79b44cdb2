"""Reads the YAML of a config: texts, numbers, lists and mappings, of a size that a person writes. All else is an
error."""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from ebbtide.errors import UserError
from ebbtide.system.json_text import DEEPEST

LARGEST = 1_000_000  # Characters and values with aliases expanded: a few lines of YAML can expand to billions.
PREFIX = "tag:yaml.org,2002:"
KINDS = {
    yaml.ScalarNode: ("str", "int", "float", "bool", "null", "merge"),
    yaml.SequenceNode: ("seq",),
    yaml.MappingNode: ("map",),
}


class _Yaml(yaml.SafeLoader):
    """A YAML loader for which `1e-6` is a number (YAML 1.1 wants `1.0e-6`), dates, `1:30` and `010` (octal 8 in YAML
    1.1) are texts, and a duplicate key is an error."""

    yaml_implicit_resolvers = {
        first: [
            (tag, pattern)
            for tag, pattern in known
            if tag.removeprefix(PREFIX) not in ("timestamp", "value", "int", "float")
        ]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_DIGITS = r"\d[\d_]*"
_Yaml.add_implicit_resolver(
    f"{PREFIX}float",
    re.compile(
        rf"^[-+]?(({_DIGITS}\.?[\d_]*|\.{_DIGITS})[eE][-+]?\d+|{_DIGITS}\.[\d_]*|\.{_DIGITS}|\.(inf|Inf|INF))$"
        r"|^\.(nan|NaN|NAN)$"
    ),
    list("-+.0123456789"),
)
_Yaml.add_implicit_resolver(
    f"{PREFIX}int", re.compile(r"^[-+]?(0|[1-9][\d_]*|0x[\da-fA-F_]+|0b[01_]+)$"), list("-+0123456789")
)


def _mapping_without_repeats(loader: _Yaml, node: yaml.MappingNode) -> dict[Any, Any]:
    names: set[str] = set()
    for key_node, _ in node.value:
        if key_node.tag == f"{PREFIX}merge":
            continue
        name = loader.construct_object(key_node, deep=True)
        if not isinstance(name, str):
            raise _error(f"the key {name!r} is not a text: write it in quotes", key_node)
        if name in names:
            raise _error(f"the key {name!r} appears twice", key_node)
        names.add(name)
    loader.flatten_mapping(node)
    return dict([loader.construct_object(part, deep=True) for part in pair] for pair in node.value)


_Yaml.add_constructor("tag:yaml.org,2002:map", _mapping_without_repeats)


def read_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; an error message starts with `where` the text comes from."""
    try:
        loader = _Yaml(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(loader, node, {})
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError) as error:  # ValueError: too many digits.
        raise UserError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None


def _measure(loader: _Yaml, node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """(size, depth) of a node with its aliases expanded, each node visited once; raises for what no config contains."""
    if id(node) in known:
        found = known[id(node)]
        if found is None:
            raise _error("an alias refers to a value that contains it", node)
        return found
    known[id(node)] = None  # Until everything inside the node is measured.
    _check_kind(loader, node)
    if isinstance(node, yaml.ScalarNode):
        size, depth = 1 + len(node.value), 0
    else:
        inside = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        sizes = [_measure(loader, part, known) for part in inside]
        size, depth = 1 + sum(size for size, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)
    if size > LARGEST:
        raise _error(f"with its aliases expanded it has more than {LARGEST:,} characters", node)
    if depth > DEEPEST:
        raise _error(f"its lists or mappings are nested more than {DEEPEST} deep", node)
    known[id(node)] = size, depth
    return size, depth


def _check_kind(loader: _Yaml, node: yaml.Node) -> None:
    kind = node.tag.removeprefix(PREFIX)
    if kind not in KINDS[type(node)]:
        raise _error(f"`{node.tag.replace(PREFIX, '!!')}` is not a type of value in a config: remove the tag", node)
    if not isinstance(node, yaml.ScalarNode):
        return
    plain = loader.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
    if kind != "str" and node.tag != plain:
        raise _error(f"{node.value!r} is not a valid `!!{kind}`: remove `!!{kind}`", node)
    if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in node.value):
        raise _error(f"{node.value!r} has a NUL or a lone surrogate, which neither files nor models accept", node)


def _error(what: str, node: yaml.Node) -> ConstructorError:
    return ConstructorError(None, None, what, node.start_mark)
