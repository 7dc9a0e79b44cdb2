"""What is wrong with a config, in words: the key, the value, and what to write instead. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

WANTED = {"string_type": "a text: put it in quotes", "bool_type": "`true` or `false`", "int_type": "an integer"}
"""Kinds of pydantic's errors, in words for those whose own say too little."""


def explained(problem: dict[str, Any], root: type[BaseModel]) -> str:
    """One line for one pydantic error: the key, the value, and what to write instead."""
    keys = [str(part) for part in problem["loc"]]
    dotted = ".".join(keys)
    if problem["type"] == "extra_forbidden":
        return f"unknown key `{dotted}` (= {_short(problem['input'])}). {_nearest(keys, root)}"
    if problem["type"] == "missing":
        return f"`{dotted}` is missing: {_meaning(keys, root)}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"`{dotted}`: {message}" if dotted and f"`{dotted}" not in message else message
    section = section_at(keys, root)
    if section is not None:
        some = list(section.model_fields)[:3]
        message = f"a section with keys such as {', '.join(some)}: write `{dotted}.{some[0]}=...`"
    message = WANTED.get(problem["type"], message).removeprefix("Input should be ").removeprefix("a valid ")
    return f"`{dotted}` is {_short(problem['input'])} and should be {message}. Its meaning: {_meaning(keys, root)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def section_at(keys: Sequence[str], root: type[BaseModel]) -> type[BaseModel] | None:
    """The section class that the dotted path names, if it names one."""
    section = root
    for key in keys:
        found = sections(section).get(key)
        if found is None:
            return None
        section = found
    return section


def sections(section: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The fields of a section that are sections themselves (`X` or `X | None`)."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in section.model_fields.items():
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[name] = kind
    return found


def all_keys(section: type[BaseModel], above: str = "") -> Iterator[str]:
    """Every key of a section and of those in it, dotted."""
    for name in section.model_fields:
        yield above + name
    for name, below in sections(section).items():
        yield from all_keys(below, f"{above}{name}.")


def _nearest(keys: Sequence[str], root: type[BaseModel]) -> str:
    section = section_at(keys[:-1], root)
    siblings = list(section.model_fields) if section else []
    near = difflib.get_close_matches(keys[-1], siblings, n=1)
    if near:
        return f"Did you mean `{'.'.join([*keys[:-1], near[0]])}`?"
    same_name = [key for key in all_keys(root) if key.rsplit(".", 1)[-1] == keys[-1]]
    if same_name:
        return f"Did you mean `{same_name[0]}`?"
    return f"Valid keys here: {', '.join(siblings)}."


def _meaning(keys: Sequence[str], root: type[BaseModel]) -> str:
    while keys and keys[-1].isdigit():  # an entry of a list: the list has the meaning
        keys = keys[:-1]
    section = section_at(keys[:-1], root)
    field = section.model_fields.get(keys[-1]) if section else None
    return field.description if field is not None and field.description else "see docs/config.md"
