"""Values as people write them, in the types that the config has: `bf16`, `1e3` for a count, `loss.kl=0.04`, one text for a list.

What could mean two things stays as it is, and is refused. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from ebbtide.config.tree import BuiltinTask, Cluster, Correction, FileTask, GymTask, Kl, Model, PythonTask, Wandb

MAIN: Mapping[type[BaseModel], str] = {
    Kl: "coefficient",
    Correction: "cap",
    Model: "path",
    BuiltinTask: "name",
    GymTask: "dataset",
    FileTask: "train",
    PythonTask: "object",
    Cluster: "gpus",
    Wandb: "project",
}
"""Of a section that is written as one value, the key that it is for."""

DTYPES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
}
EXACT = 2**53  # beyond it a float does not say which whole number was meant


def as_meant(section: type[BaseModel], tree: Mapping[str, Any]) -> dict[str, Any]:
    """A section's tree, as the section wants it where the meaning is plain."""
    fields = section.model_fields
    return {name: _meant(fields[name].annotation, value) if name in fields else value for name, value in tree.items()}


def main_key(section: type[BaseModel] | None) -> str | None:
    """The key that one value in place of the section is for."""
    return MAIN.get(section) if section is not None else None


def spread(section: type[BaseModel] | None, value: Any) -> Any:
    """A section that is written as one value, as a tree; as it is where that says nothing."""
    if (key := main_key(section)) is not None and isinstance(value, str | int | float) and not isinstance(value, bool):
        return {key: value}
    return value


def _meant(annotation: Any, value: Any) -> Any:
    kinds = list(_kinds(annotation))
    optional = NoneType in kinds
    if optional and value in ("None", "none"):
        return None
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return _section(kind, value, optional)
        if get_origin(kind) is list:
            if value is None or isinstance(value, dict):
                return value
            return [_meant(get_args(kind)[0], item) for item in (value if isinstance(value, list) else [value])]
        if get_origin(kind) is Literal and isinstance(value, str):
            return _option(get_args(kind), value)
    if int in kinds and float not in kinds and isinstance(value, float) and value.is_integer() and abs(value) <= EXACT:
        return int(value)
    return value


def _kinds(annotation: Any) -> Iterator[Any]:
    """What a field may be: the parts of a union, without their bounds."""
    if hasattr(annotation, "__metadata__"):  # Annotated
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) in (list, dict, Literal) or not get_args(annotation):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from _kinds(part)


def _section(kind: type[BaseModel], value: Any, optional: bool) -> Any:
    if optional and isinstance(value, int | float) and value == 0:  # `false`, or no weight at all: off
        return None
    if optional and value is True and not any(field.is_required() for field in kind.model_fields.values()):
        return {}
    tree = spread(kind, value)
    return as_meant(kind, tree) if isinstance(tree, Mapping) else value


def _option(options: tuple[Any, ...], value: str) -> str:
    """One of the options, where it is only spelt another way."""
    plain = value.lower().replace("-", "_")
    if "float32" in options:
        plain = DTYPES.get(plain.removeprefix("torch."), plain.removeprefix("torch."))
    return plain if value not in options and (plain in options or plain == "float16") else value
