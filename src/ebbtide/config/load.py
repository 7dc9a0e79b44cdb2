"""Loads a checked Config from a recipe's name or a YAML file plus `a.b=c` overrides; errors say what to change."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ebbtide.config.explain import explain_error, explain_unknown
from ebbtide.config.keys import section_at
from ebbtide.config.renamed import upgrade
from ebbtide.config.rewards import RewardConfig
from ebbtide.config.root import Config
from ebbtide.config.roots import DEFAULT, find_root, roots
from ebbtide.config.serve import ServeConfig
from ebbtide.config.values import convert_values, expand_rewards, expand_single_value, main_key
from ebbtide.config.yaml_text import read_yaml
from ebbtide.errors import UserError
from ebbtide.system.json_text import DEEPEST

T = TypeVar("T", bound=BaseModel)


def recipes() -> dict[str, str]:
    """Name -> description of each recipe that ships; the description is the first comment of its file."""
    folder = resources.files("ebbtide.config") / "recipes"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file.read_text().splitlines()[0].lstrip("# ") for file in files}


def load(source: str, overrides: Sequence[str] = ()) -> Config:
    """The config that `source` (a recipe's name or a YAML file) and `overrides` (`a.b=c`) describe."""
    tree, where = _read(source)
    for override in overrides:
        if override.startswith("algorithm="):
            tree["algorithm"] = override.partition("=")[2]
    if isinstance(section := tree.get("algorithm"), dict):  # a section of another tool's config
        lines = "\n".join(f"  - {line}" for line in explain_unknown(["algorithm"], section, roots()[DEFAULT]))
        raise UserError(f"the config from {where} is not valid:\n{lines}")
    root = find_root(tree, f"the config from {where}")
    _apply(tree, overrides, root)
    return _valid(root, tree, f"the config from {where}")


def load_text(text: str, where: str, name: str) -> Config:
    """The config that a YAML text describes; `where` it comes from begins error messages, and `name` is the run's."""
    tree = _parse(text, where)
    tree.setdefault("run", {}).setdefault("name", name)
    return _valid(find_root(tree, where), tree, where)


def replace_overrides(overrides: Sequence[str], changes: Mapping[str, object]) -> list[str]:
    """The overrides with these changes appended; they replace earlier values of the same keys."""
    kept = [override for override in overrides if override.partition("=")[0] not in changes]
    return [*kept, *(f"{key}={value}" for key, value in changes.items())]


def load_serve(overrides: Sequence[str]) -> ServeConfig:
    """The settings of `ebbtide serve`, from its command line."""
    tree: dict[str, Any] = {}
    _apply(tree, overrides, ServeConfig)
    return _valid(ServeConfig, tree, "the config of `ebbtide serve`")


def _valid(root: type[T], tree: dict[str, Any], what: str) -> T:
    try:
        return root.model_validate(convert_values(root, tree))
    except ValidationError as error:
        # Unknown keys come first: a misspelt section is also a missing one, and the spelling is what to fix.
        ordered = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        problems = [line for problem in ordered for line in explain_error(dict(problem), root)]
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
        # The config that a run or a checkpoint has beside it may predate the renaming of a key.
        if any((path.parent / name).exists() for name in ("metrics.jsonl", "manifest.json")):
            tree = upgrade(tree)
        if isinstance(tree.setdefault("run", {}), dict):
            tree["run"].setdefault("name", path.stem)
        return tree, source
    near = difflib.get_close_matches(source, known, n=1)
    hint = f"Did you mean `{near[0]}`?" if near else "`ebbtide recipes` lists what ships."
    if "=" in source:
        hint = f"It is a setting: put a recipe or a config file before it, as in `quickstart {source}`."
    raise UserError(f"`{source}` is neither a recipe nor a config file. {hint}")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # The name is one that no file can have.
        return False


def _parse(text: str, where: str) -> dict[str, Any]:
    tree = read_yaml(text, where)
    if tree is None:
        raise UserError(f"{where} is empty: it must contain `key: value` lines")
    if not isinstance(tree, dict):
        raise UserError(f"{where} must contain `key: value` lines, but contains a {type(tree).__name__}")
    return tree


def _apply(tree: dict[str, Any], overrides: Sequence[str], root: type[BaseModel]) -> None:
    """Applies the overrides to `tree`, one after the other."""
    for place, override in enumerate(overrides):
        key, _, value = override.partition("=")
        main = main_key(section_at(key.split("."), root))
        undone = [earlier for earlier in overrides[:place] if earlier.startswith(f"{key}.")]
        if isinstance(_override(tree, override, root), str) and main is not None and undone:
            raise UserError(
                f"`{override}` would undo `{undone[-1]}`, which comes before it: write `{key}.{main}={value}`"
            )


def _override(tree: dict[str, Any], override: str, root: type[BaseModel]) -> Any:
    """Sets `a.b=c` in `tree` and returns the value. The value is read as YAML, so `null`, `1e-6` and `[1, 2]` mean the
    same as in a file."""
    dotted, equals, text = override.partition("=")
    keys = dotted.lstrip("+").split(".")  # `+` is Hydra's sign for a new key.
    if not equals or not all(keys) or len(keys) > DEEPEST:
        raise UserError(f"`{override}` is not an override: write `section.key=value`, as in `train.steps=50`")
    value = read_yaml(text, f"the value of `{override}`") if text else ""
    for depth, key in enumerate(keys[:-1]):
        below = tree.get(key)
        if below is None or below is True:
            below = tree[key] = {}
        if not isinstance(below, dict):  # `model: Qwen/Qwen3-0.6B` in the file, and now `model.dtype=bfloat16`
            below = tree[key] = expand_single_value(section_at(keys[: depth + 1], root), below)
            if key == "rewards" and section_at(keys[: depth + 2], root) is RewardConfig:
                below = tree[key] = expand_rewards(below)
        if not isinstance(below, dict):
            raise UserError(
                f"`{override}`: `{'.'.join(keys[: depth + 1])}` is {below!r}, not a section, and has no key"
                f" `{keys[depth + 1]}`"
            )
        tree = below
    section, now = section_at(keys, root), tree.get(keys[-1])
    main = main_key(section)
    if isinstance(now, dict) and value is True and section is not None:
        return value  # The section is on already and keeps its settings.
    if isinstance(now, dict) and value and isinstance(value, int | float) and main is not None:
        # `loss.kl=0.04` keeps the section's other settings; a new name, as in `model=...`, is another thing: it does
        # not.
        now[main] = value
    else:
        tree[keys[-1]] = value
    return value
