"""Converts values as people write them to the types of the config: `bf16`, `1e3` for a count, `loss.kl=0.04`, one
text for a list.

Ambiguous values are left as they are, and the config refuses them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from ebbtide.config.data import ExamplesConfig, PairsConfig
from ebbtide.config.loss import ImportanceSamplingConfig, KlConfig
from ebbtide.config.model import ModelConfig
from ebbtide.config.parallel import ParallelConfig
from ebbtide.config.report import WandbConfig
from ebbtide.config.rewards import PythonTaskConfig, RewardConfig, RewardModelConfig
from ebbtide.config.task import BuiltinTaskConfig, FileTaskConfig, GymTaskConfig, TaskConfig
from ebbtide.errors import UserError

MAIN_KEYS: Mapping[type[BaseModel], str] = {
    KlConfig: "coefficient",
    ImportanceSamplingConfig: "high",
    ModelConfig: "path",
    BuiltinTaskConfig: "name",
    GymTaskConfig: "dataset",
    FileTaskConfig: "train",
    ExamplesConfig: "train",
    PairsConfig: "train",
    PythonTaskConfig: "object",
    RewardModelConfig: "path",
    ParallelConfig: "gpus",
    WandbConfig: "project",
}
"""Section -> the key that a single value in place of the section sets."""

DTYPES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
}
EXACT = 2**53  # Beyond this a float does not represent every integer, so it is unclear which one was meant.


def convert_values(section: type[BaseModel], tree: Mapping[str, Any]) -> dict[str, Any]:
    """A section's tree with values converted to the section's types where their meaning is clear."""
    fields = section.model_fields
    return {name: _meant(fields[name].annotation, value) if name in fields else value for name, value in tree.items()}


def main_key(section: type[BaseModel] | None) -> str | None:
    """The key that a single value in place of the section sets, if there is one."""
    return MAIN_KEYS.get(section) if section is not None else None


def expand_single_value(section: type[BaseModel] | None, value: Any) -> Any:
    """The tree that a single value in place of a section stands for; any other value is returned unchanged."""
    if section is TaskConfig and isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        return {"mix": _named(value, "task")}
    if (key := main_key(section)) is not None and isinstance(value, str | int | float) and not isinstance(value, bool):
        return {key: value}
    return value


def expand_rewards(value: Any) -> Any:
    """The mapping that a list in place of `task.rewards` stands for; any other value is returned unchanged."""
    is_list = isinstance(value, list) and all(isinstance(one, Mapping) for one in value)
    return _named(value, "reward") if is_list else value


def _named(sections: Sequence[Mapping[str, Any]], called: str) -> dict[str, Any]:
    """The sections of a list by their `name`, or else by their place."""
    found: dict[str, Any] = {}
    for place, one in enumerate(sections, start=1):
        name = str(one.get("name", f"{called}{place}"))
        if name in found:
            raise UserError(f"a list of {called}s has two that are called {name!r}: give each a `name` of its own")
        found[name] = {key: value for key, value in one.items() if key != "name"}
    return found


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
        if get_origin(kind) is dict and get_args(kind)[1] is RewardConfig:
            value = expand_rewards(value)
        if get_origin(kind) is dict and isinstance(value, Mapping):
            return {name: _meant(get_args(kind)[1], one) for name, one in value.items()}
        if get_origin(kind) is Literal and isinstance(value, str):
            return _option(get_args(kind), value)
    if int in kinds and float not in kinds and isinstance(value, float) and value.is_integer() and abs(value) <= EXACT:
        return int(value)
    return value


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types that a field accepts: the members of a union, without their bounds."""
    if hasattr(annotation, "__metadata__"):  # Annotated
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) in (list, dict, Literal) or not get_args(annotation):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from _kinds(part)


def _section(kind: type[BaseModel], value: Any, optional: bool) -> Any:
    if optional and isinstance(value, int | float) and value == 0:  # `false` or a weight of 0 is off.
        return None
    if optional and value is True and not any(field.is_required() for field in kind.model_fields.values()):
        return {}
    tree = expand_single_value(kind, value)
    return convert_values(kind, tree) if isinstance(tree, Mapping) else value


def _option(options: tuple[Any, ...], value: str) -> str:
    """The option that differs from `value` only in spelling, if there is one; otherwise `value`."""
    plain = value.lower().replace("-", "_")
    if "float32" in options:
        plain = DTYPES.get(plain.removeprefix("torch."), plain.removeprefix("torch."))
    return plain if value not in options and (plain in options or plain == "float16") else value
