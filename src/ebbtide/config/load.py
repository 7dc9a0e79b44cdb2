"""From a recipe's name or a YAML file plus `a.b=c` overrides to a checked Config, or to an error that says what to change."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ebbtide.config.explain import explained, section_at
from ebbtide.config.serve import Serve
from ebbtide.config.tree import Config
from ebbtide.config.written import as_meant, main_key, spread
from ebbtide.config.yaml_text import read_yaml
from ebbtide.errors import UserError
from ebbtide.json_text import DEEPEST

T = TypeVar("T", bound=BaseModel)


def recipes() -> dict[str, str]:
    """Name -> one line on each recipe that ships: the first comment of its file."""
    folder = resources.files("ebbtide.config") / "recipes"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file.read_text().splitlines()[0].lstrip("# ") for file in files}


def load(source: str, overrides: Sequence[str] = ()) -> Config:
    """The config that `source` (a recipe's name or a YAML file) and `overrides` (`a.b=c`) describe."""
    tree, where = _read(source)
    _apply(tree, overrides, Config)
    return _valid(Config, tree, f"the config from {where}")


def changed(overrides: Sequence[str], changes: Mapping[str, object]) -> list[str]:
    """The overrides with these changes at their end, in place of what they had for the same keys."""
    kept = [override for override in overrides if override.partition("=")[0] not in changes]
    return [*kept, *(f"{key}={value}" for key, value in changes.items())]


def load_serve(overrides: Sequence[str]) -> Serve:
    """What `ebbtide serve` was told."""
    tree: dict[str, Any] = {}
    _apply(tree, overrides, Serve)
    return _valid(Serve, tree, "what `ebbtide serve` was told")


def _valid(root: type[T], tree: dict[str, Any], what: str) -> T:
    try:
        return root.model_validate(as_meant(root, tree))
    except ValidationError as error:
        # Unknown keys first: a misspelt section is also a missing one, and the spelling is what to mend.
        ordered = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        problems = [line for problem in ordered for line in explained(dict(problem), root)]
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
    if "=" in source:
        hint = f"It is a setting: name a recipe or a file as well, as in `quickstart {source}`."
    raise UserError(f"`{source}` is neither a recipe nor a config file. {hint}")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have
        return False


def _parse(text: str, where: str) -> dict[str, Any]:
    tree = read_yaml(text, where)
    if tree is None:
        raise UserError(f"{where} is empty: it must hold `key: value` lines")
    if not isinstance(tree, dict):
        raise UserError(f"{where} must hold `key: value` lines, and holds {type(tree).__name__}")
    return tree


def _apply(tree: dict[str, Any], overrides: Sequence[str], root: type[BaseModel]) -> None:
    """One after the other."""
    for place, override in enumerate(overrides):
        key, _, value = override.partition("=")
        main = main_key(section_at(key.split("."), root))
        undone = [earlier for earlier in overrides[:place] if earlier.startswith(f"{key}.")]
        if isinstance(_override(tree, override, root), str) and main is not None and undone:
            raise UserError(f"`{override}` would undo `{undone[-1]}`, which stands before it: write `{key}.{main}={value}`")


def _override(tree: dict[str, Any], override: str, root: type[BaseModel]) -> Any:
    """Sets `a.b=c` in `tree`, and returns the value: read as YAML, so `null`, `1e-6` and `[1, 2]` mean what they do in a file."""
    dotted, equals, text = override.partition("=")
    keys = dotted.lstrip("+").split(".")  # Hydra's sign for a new key
    if not equals or not all(keys) or len(keys) > DEEPEST:
        raise UserError(f"`{override}` is not an override: write `section.key=value`, as in `train.steps=50`")
    value = read_yaml(text, f"the value of `{override}`") if text else ""
    for depth, key in enumerate(keys[:-1]):
        below = tree.get(key)
        if below is None or below is True:
            below = tree[key] = {}
        if not isinstance(below, dict):
            below = tree[key] = spread(
                section_at(keys[: depth + 1], root), below
            )  # `model: Qwen/Qwen3-0.6B` in the file, and now `model.dtype=bfloat16`
        if not isinstance(below, dict):
            raise UserError(
                f"`{override}`: `{'.'.join(keys[: depth + 1])}` is {below!r}, not a section that could hold `{keys[depth + 1]}`"
            )
        tree = below
    section, now = section_at(keys, root), tree.get(keys[-1])
    main = main_key(section)
    if isinstance(now, dict) and value is True and section is not None:
        return value  # it is on, with what is set of it
    if isinstance(now, dict) and value and isinstance(value, int | float) and main is not None:
        now[main] = value  # of `loss.kl=0.04`; a name would be of another thing, whose other settings are not these
    else:
        tree[keys[-1]] = value
    return value
