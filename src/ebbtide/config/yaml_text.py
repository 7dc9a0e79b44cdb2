"""YAML as a config has it: texts, numbers, lists and mappings, as many as a person writes. All else is an error."""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from ebbtide.errors import UserError
from ebbtide.json_text import DEEPEST

LARGEST = 1_000_000  # characters and values, counted wherever an alias repeats them: a few lines can be billions
PREFIX = "tag:yaml.org,2002:"
KINDS = {
    yaml.ScalarNode: ("str", "int", "float", "bool", "null", "merge"),
    yaml.SequenceNode: ("seq",),
    yaml.MappingNode: ("map",),
}


class _Yaml(yaml.SafeLoader):
    """YAML in which `1e-6` is a number (YAML 1.1 wants `1.0e-6`), a date and `1:30` are texts, `010` is no octal 8 but a
    text as well, and a key that stands twice is wrong."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag.removeprefix(PREFIX) not in ("timestamp", "value", "int", "float")]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_DIGITS = r"\d[\d_]*"
_Yaml.add_implicit_resolver(
    f"{PREFIX}float",
    re.compile(rf"^[-+]?(({_DIGITS}\.?[\d_]*|\.{_DIGITS})[eE][-+]?\d+|{_DIGITS}\.[\d_]*|\.{_DIGITS}|\.(inf|Inf|INF))$|^\.(nan|NaN|NAN)$"),
    list("-+.0123456789"),
)
_Yaml.add_implicit_resolver(f"{PREFIX}int", re.compile(r"^[-+]?(0|[1-9][\d_]*|0x[\da-fA-F_]+|0b[01_]+)$"), list("-+0123456789"))


def _mapping_without_repeats(loader: _Yaml, node: yaml.MappingNode) -> dict[Any, Any]:
    names: set[str] = set()
    for key_node, _ in node.value:
        if key_node.tag == f"{PREFIX}merge":
            continue
        name = loader.construct_object(key_node, deep=True)
        if not isinstance(name, str):
            raise _error(f"the key {name!r} is not a text", key_node)
        if name in names:
            raise _error(f"the key {name!r} stands here twice", key_node)
        names.add(name)
    loader.flatten_mapping(node)
    return dict([loader.construct_object(part, deep=True) for part in pair] for pair in node.value)


_Yaml.add_constructor("tag:yaml.org,2002:map", _mapping_without_repeats)


def read_yaml(text: str, where: str) -> Any:
    """What the text says; `where` it stands begins the message when it says nothing."""
    try:
        loader = _Yaml(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(loader, node, {})
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError) as error:  # also a number without end
        raise UserError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None


def _measure(loader: _Yaml, node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """(size, depth) of what a node stands for, each looked at once; raises where it stands for what no config has."""
    if id(node) in known:
        found = known[id(node)]
        if found is None:
            raise _error("an alias stands for a value that it is part of", node)
        return found
    known[id(node)] = None  # until all inside it is known
    _check_kind(loader, node)
    if isinstance(node, yaml.ScalarNode):
        size, depth = 1 + len(node.value), 0
    else:
        inside = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        sizes = [_measure(loader, part, known) for part in inside]
        size, depth = 1 + sum(size for size, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)
    if size > LARGEST:
        raise _error(f"with its aliases written out it has more than {LARGEST:,} characters", node)
    if depth > DEEPEST:
        raise _error(f"it has lists or mappings more than {DEEPEST} deep inside each other", node)
    known[id(node)] = size, depth
    return size, depth


def _check_kind(loader: _Yaml, node: yaml.Node) -> None:
    kind = node.tag.removeprefix(PREFIX)
    if kind not in KINDS[type(node)]:
        raise _error(f"`{node.tag.replace(PREFIX, '!!')}` is no kind of value that a config has: leave it out", node)
    if not isinstance(node, yaml.ScalarNode):
        return
    plain = loader.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
    if kind != "str" and node.tag != plain:
        raise _error(f"{node.value!r} is not written as `!!{kind}` is: leave `!!{kind}` out", node)
    if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in node.value):
        raise _error(f"{node.value!r} has a zero or half of a character, which neither files nor models take", node)


def _error(what: str, node: yaml.Node) -> ConstructorError:
    return ConstructorError(None, None, what, node.start_mark)
