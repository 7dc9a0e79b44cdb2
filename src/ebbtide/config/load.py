"""From a recipe's name or a YAML file plus `a.b=c` overrides to a checked Config, or to an error that says what to change."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ebbtide.config.serve import Serve
from ebbtide.config.tree import Config
from ebbtide.errors import UserError

T = TypeVar("T", bound=BaseModel)


class _Yaml(yaml.SafeLoader):
    """YAML in which `1e-6` is a number (YAML 1.1 wants `1.0e-6`) and a key that stands twice is an error."""


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _mapping_without_repeats(loader: _Yaml, node: yaml.MappingNode) -> dict[Any, Any]:
    written = [key_node for key_node, _ in node.value if key_node.tag != "tag:yaml.org,2002:merge"]
    names = [loader.construct_object(key_node, deep=True) for key_node in written]
    for place, (name, key_node) in enumerate(zip(names, written, strict=True)):
        if name in names[:place]:
            raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} stands here twice", key_node.start_mark)
        if not isinstance(name, str):
            raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} is not a text", key_node.start_mark)
    loader.flatten_mapping(node)
    return {loader.construct_object(key, deep=True): loader.construct_object(value, deep=True) for key, value in node.value}


_Yaml.add_constructor("tag:yaml.org,2002:map", _mapping_without_repeats)


def recipes() -> dict[str, str]:
    """Name -> one line on each recipe that ships: the first comment of its file."""
    folder = resources.files("ebbtide.config") / "recipes"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file.read_text().splitlines()[0].lstrip("# ") for file in files}


def load(source: str, overrides: Sequence[str] = ()) -> Config:
    """The config that `source` (a recipe's name or a YAML file) and `overrides` (`a.b=c`) describe."""
    tree, where = _read(source)
    for override in overrides:
        _override(tree, override)
    return _valid(Config, tree, f"the config from {where}")


def changed(overrides: Sequence[str], changes: Mapping[str, object]) -> list[str]:
    """The overrides with these changes at their end, in place of what they had for the same keys."""
    kept = [override for override in overrides if override.partition("=")[0] not in changes]
    return [*kept, *(f"{key}={value}" for key, value in changes.items())]


def load_serve(overrides: Sequence[str]) -> Serve:
    """What `ebbtide serve` was told."""
    tree: dict[str, Any] = {}
    for override in overrides:
        _override(tree, override)
    return _valid(Serve, tree, "what `ebbtide serve` was told")


def _valid(root: type[T], tree: dict[str, Any], what: str) -> T:
    try:
        return root.model_validate(tree)
    except ValidationError as error:
        # Unknown keys first: a misspelt section is also a missing one, and the spelling is what to mend.
        ordered = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        problems = [_explain(dict(problem), root) for problem in ordered]
        lines = "\n".join(f"  - {line}" for line in dict.fromkeys(problems))
        raise UserError(f"{what} is not valid:\n{lines}") from None


def _read(source: str) -> tuple[dict[str, Any], str]:
    known = recipes()
    if source in known:
        text = (resources.files("ebbtide.config") / "recipes" / f"{source}.yaml").read_text()
        tree = _parse(text, f"recipe {source}")
        tree.setdefault("run", {}).setdefault("name", source)
        return tree, f"recipe `{source}`"
    path = Path(source)
    if _is_file(path):
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the config file {source}: {error}") from None
        tree = _parse(text, source)
        if isinstance(tree.setdefault("run", {}), dict):
            tree["run"].setdefault("name", path.stem)
        return tree, source
    near = difflib.get_close_matches(source, known, n=1)
    hint = f"Did you mean `{near[0]}`?" if near else "`ebbtide recipes` lists what ships."
    raise UserError(f"`{source}` is neither a recipe nor a config file. {hint}")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have
        return False


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        tree = yaml.load(text, _Yaml)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that does not exist, a thousand brackets
        raise UserError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        raise UserError(f"{where} is empty: it must hold `key: value` lines")
    if not isinstance(tree, dict):
        raise UserError(f"{where} must hold `key: value` lines, and holds {type(tree).__name__}")
    return tree


def _override(tree: dict[str, Any], override: str) -> None:
    """Sets `a.b=c` in `tree`; the value is read as YAML, so `null`, `1e-6` and `[1, 2]` mean what they do in a file."""
    dotted, equals, text = override.partition("=")
    keys = dotted.split(".")
    if not equals or not all(keys):
        raise UserError(f"`{override}` is not an override: write `section.key=value`, as in `train.steps=50`")
    try:
        value = yaml.load(text, _Yaml) if text else ""  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"the value of `{override}` is not valid YAML: {' '.join(str(error).split())}") from None
    for depth, key in enumerate(keys[:-1]):
        below = tree.get(key)
        if below is None:
            below = tree[key] = {}
        if not isinstance(below, dict):
            raise UserError(
                f"`{override}`: `{'.'.join(keys[: depth + 1])}` is {below!r}, not a section that could hold `{keys[depth + 1]}`"
            )
        tree = below
    tree[keys[-1]] = value


def _explain(problem: dict[str, Any], root: type[BaseModel]) -> str:
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
    section = _section(keys, root)
    if section is not None:
        message = f"a section with keys such as {', '.join(list(section.model_fields)[:3])}"
    message = message.removeprefix("Input should be ").removeprefix("a valid ")
    return f"`{dotted}` is {_short(problem['input'])} and should be {message}. Its meaning: {_meaning(keys, root)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _section(keys: Sequence[str], root: type[BaseModel]) -> type[BaseModel] | None:
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


def _all_keys(section: type[BaseModel], above: str = "") -> Iterator[str]:
    for name in section.model_fields:
        yield above + name
    for name, below in sections(section).items():
        yield from _all_keys(below, f"{above}{name}.")


def _nearest(keys: Sequence[str], root: type[BaseModel]) -> str:
    section = _section(keys[:-1], root)
    siblings = list(section.model_fields) if section else []
    near = difflib.get_close_matches(keys[-1], siblings, n=1)
    if near:
        return f"Did you mean `{'.'.join([*keys[:-1], near[0]])}`?"
    same_name = [key for key in _all_keys(root) if key.rsplit(".", 1)[-1] == keys[-1]]
    if same_name:
        return f"Did you mean `{same_name[0]}`?"
    return f"Valid keys here: {', '.join(siblings)}."


def _meaning(keys: Sequence[str], root: type[BaseModel]) -> str:
    while keys and keys[-1].isdigit():  # an entry of a list: the list has the meaning
        keys = keys[:-1]
    section = _section(keys[:-1], root)
    field = section.model_fields.get(keys[-1]) if section else None
    return field.description if field is not None and field.description else "see docs/config.md"
