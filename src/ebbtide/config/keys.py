"""The keys of a config: which there are, and which of them are sections. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel


def section_at(keys: Sequence[str], root: type[BaseModel]) -> type[BaseModel] | None:
    """The section class at this path, if there is one."""
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
    """Every dotted key of a section and of the sections in it."""
    for name in section.model_fields:
        yield above + name
    for name, below in sections(section).items():
        yield from all_keys(below, f"{above}{name}.")
