"""Describes Python methods as tools, in the JSON schema that chat templates render."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def tool_schema(method: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a tool, from its signature and its docstring: what stands above `Args:` describes it, and each
    `name: text` below it an argument. A tool that knows its schema has it as an attribute `schema`."""
    if isinstance(known := getattr(method, "schema", None), dict):
        return known
    about, arguments = _read_docstring(inspect.getdoc(method) or "")
    try:
        hints = get_type_hints(method)
    except (NameError, TypeError):  # types that only a type checker knows
        hints = {}
    properties, required = {}, []
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        properties[name] = _type_schema(hints.get(name)) | (
            {"description": arguments[name]} if name in arguments else {}
        )
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": method.__name__, "description": about, "parameters": parameters},
    }


def _type_schema(hint: Any) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"type": TYPES.get(type(inner[0]), "string"), "enum": list(inner)}
    if origin in (Union, types.UnionType):
        kinds = [one for one in inner if one is not type(None)]
        return _type_schema(kinds[0]) if len(kinds) == 1 else {"anyOf": [_type_schema(one) for one in kinds]}
    kind = TYPES.get(origin or hint)
    if kind == "array" and inner:
        return {"type": kind, "items": _type_schema(inner[0])}
    return {"type": kind} if kind is not None else {}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(the description, argument -> its description)."""
    about, _, rest = text.partition("Args:")
    found: dict[str, str] = {}
    name = None
    for line in rest.splitlines():
        if re.match(r"(Returns|Raises|Yields|Example|Note)s?:", line):
            break
        if match := re.match(r"\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line):
            name = match[1]
            found[name] = match[2]
        elif name is not None and line.strip():
            found[name] += f" {line.strip()}"
    about = re.split(r"\n(?:Returns|Raises|Yields|Example|Note)s?:", about)[0]
    return " ".join(about.split()), found
