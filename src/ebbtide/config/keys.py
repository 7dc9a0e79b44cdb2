"""The keys of a config: which there are, and which of them are sections. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args, get_origin

from pydantic import BaseModel


def section_at(keys: Sequence[str], root: type[BaseModel]) -> type[BaseModel] | None:
    """The section class at this path, if there is one."""
    section, left = root, list(keys)
    while left:
        key = left.pop(0)
        found = sections(section).get(key)
        if found is None and left:  # Sections by names that people choose: any name leads to one.
            found = named_sections(section).get(key)
            left.pop(0)
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


def named_sections(section: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The fields of a section that map names to sections (`dict[str, X]` or `dict[str, X] | None`)."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in section.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if (
                get_origin(kind) is dict
                and isinstance(below := get_args(kind)[1], type)
                and issubclass(below, BaseModel)
            ):
                found[name] = below
    return found


def all_keys(section: type[BaseModel], above: str = "") -> Iterator[str]:
    """Every dotted key of a section and of the sections in it."""
    for name in section.model_fields:
        yield above + name
    for name, below in sections(section).items():
        yield from all_keys(below, f"{above}{name}.")
