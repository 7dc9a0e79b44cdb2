"""The config as text: `ebbtide config` (one run, resolved) and docs/config.md (every field)."""

from __future__ import annotations

import json
import textwrap
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ebbtide.config.explain import all_keys, section_at, sections
from ebbtide.config.foreign import names_known
from ebbtide.config.serve import Serve
from ebbtide.config.tree import Config
from ebbtide.config.written import main_key


def resolved(config: Config) -> str:
    """The config as plain YAML: what `config.yaml` in a run folder holds. Reading it gives the same config again."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def explained(config: Config) -> str:
    """The same YAML with each field's meaning above it."""
    return "\n".join(_explained(config, "")) + "\n"


def _explained(section: BaseModel, indent: str) -> list[str]:
    lines: list[str] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        comment = textwrap.wrap(field.description or "", width=110 - len(indent))
        lines += [f"{indent}# {line}" for line in comment]
        if isinstance(value, BaseModel):
            lines += [f"{indent}{name}:", *_explained(value, indent + "  "), ""]
        else:
            shown = section.model_dump(mode="json", include={name})[name]
            lines.append(f"{indent}{name}: {json.dumps(shown, ensure_ascii=False)}")
    return lines


def reference() -> str:
    """docs/config.md, whole."""
    lines = [
        "# Configuration",
        "",
        "<!-- Made by `make docs` from src/ebbtide/config/tree.py: edit that, not this. -->",
        "",
        "One tree holds every setting. Write it as YAML, or start from a recipe (`ebbtide recipes`), and override any key on the",
        "command line: `ebbtide train quickstart train.steps=50 loss.kl.coefficient=0.01`. `ebbtide config RECIPE` prints the resolved",
        "tree with each field's meaning. An unknown key is an error. A section that is `null` is off; one that is present is on.",
        "",
        "Values may be written as people write them where the meaning is plain: `bf16` for `bfloat16`, `1e3` for an integer,",
        "one item in place of a list, `false` for a section that may be `null` and `true` for its defaults. Some sections take",
        "one value for their main key:",
        f"{_main_keys()}.",
        "On the command line `--train.steps=50` and `--train.steps 50` are read as `train.steps=50`.",
        "",
    ]
    return "\n".join([*lines, *_tables(Config, ""), *_tables(Serve, "", "`ebbtide serve`"), *_foreign()])


def _foreign() -> list[str]:
    rows = [f"| `{name}` | {here.replace('|', chr(92) + '|')} |" for name, here in names_known(Config).items()]
    return [
        "## Names from other tools",
        "",
        "What is known from TRL, verl, NeMo RL and Unsloth, and what it is here. A key with one of these names, alone or at the",
        "end of a dotted one, is answered with it.",
        "",
        "| name | here |",
        "|---|---|",
        *rows,
        "",
    ]


def _main_keys() -> str:
    """Such as `loss.kl=0.04`, in general: each section that takes one value, and the key that it is for."""
    named = {key: main_key(section_at(key.split("."), Config)) for key in all_keys(Config)}
    return ", ".join(f"`{key}` (`{main}`)" for key, main in named.items() if main is not None)


def _tables(section: type[BaseModel], above: str, title: str = "The top level") -> list[str]:
    below = sections(section)
    lines = [
        f"## `{above.removesuffix('.')}`" if above else f"## {title}",
        "",
        section.__doc__ or "",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, field in section.model_fields.items():
        kind = "section" if name in below else _type(field.annotation, field)
        lines.append(f"| `{above}{name}` | {kind} | {_default(field)} | {(field.description or '').replace('|', chr(92) + '|')} |")
    lines.append("")
    for name, kind_below in below.items():
        lines += _tables(kind_below, f"{above}{name}.")
    return lines


def _type(annotation: Any, field: FieldInfo | None = None) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if annotation is type(None):
        return "`null`"
    parts = get_args(annotation)
    if get_origin(annotation) in (list, tuple):
        return f"list of {_type(parts[0])}"
    if get_origin(annotation) is dict:
        return "mapping"
    if hasattr(annotation, "__metadata__"):
        return _type(parts[0]) + _bounds(annotation.__metadata__[0].metadata)
    if parts:
        return " or ".join(_type(part) for part in parts)
    names = {int: "integer", float: "number", str: "text", bool: "`true`, `false`"}
    return names.get(annotation, str(annotation)) + (_bounds(field.metadata) if field else "")


def _bounds(metadata: list[Any]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [f"{sign} {getattr(bound, name):g}" for bound in metadata for name, sign in signs.items() if hasattr(bound, name)]
    return f" {', '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, BaseModel):
        return "its defaults"
    return f"`{yaml.safe_dump(field.default, default_flow_style=True, width=10**6).removesuffix('...' + chr(10)).strip()}`"
