"""The settings that a plan may decide, in groups that are either set by hand or free. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from ebbtide.config.root import Config

Change = Mapping[str, Any]
"""Dotted key -> value."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("optimizer.place", "optimizer.cpu_fraction"),
    "offload": ("memory.preset", "memory.offload"),
    "activations": ("memory.activations",),
    "base": ("memory.stream_base",),
    "rollout_weights": ("parallel.rollout_weights",),
    "micro-batch": ("train.microbatch_tokens",),
    "head": ("train.head_chunk_tokens",),
}
"""Keys that are decided together: if one of a group is set by hand, the plan leaves the whole group alone."""


def keys_by_hand(config: Config) -> list[str]:
    """The keys that a plan would decide but that are set by hand."""
    sections = {name: getattr(config, name) for name in ("optimizer", "memory", "train", "parallel")}
    given = {
        f"{name}.{key}" for name, section in sections.items() if section is not None for key in section.model_fields_set
    }
    return [key for keys in GROUPS.values() for key in keys if key in given]


def decidable_groups(config: Config) -> tuple[str, ...]:
    """The groups that have something to decide in this config."""
    gathers = config.generates and config.parallel is not None and not config.parallel.rollout_gpus
    decides = {"rollout_weights": gathers, "base": config.can_stream_base and config.parallel is None}
    return tuple(group for group in GROUPS if decides.get(group, True))


def free_groups(config: Config) -> tuple[str, ...]:
    """Those of `groups_of` in which no key is set by hand."""
    by_hand = set(keys_by_hand(config))
    return tuple(group for group in decidable_groups(config) if not by_hand & set(GROUPS[group]))


def keep_planned_settings(config: Config, then: Mapping[str, Any]) -> Config:
    """The config of a resumed run: it keeps the plan's earlier choices for groups that are not set by hand. `then`:
    the config that the run had before, as a tree."""
    if config.memory.plan != "auto":
        return config
    # How weights are gathered depends on the number of ranks, which may have changed, and it changes no bit.
    keys = [key for group in free_groups(config) if group != "rollout_weights" for key in GROUPS[group]]
    chosen = {
        key: then[section][name]
        for key in keys
        for section, name in [key.split(".")]
        if name in (then.get(section) or {})
    }
    return with_changes(config, chosen)


def with_chat_date(config: Config, day: object) -> Config:
    """The config with `model.chat_date` set to `day` if it was not set."""
    return (
        config if config.model.chat_date is not None or day is None else with_changes(config, {"model.chat_date": day})
    )


def validate_changes(changes: Change) -> Change:
    """The changes with plain trees validated into the sections that they describe."""
    found = {}
    for dotted, value in changes.items():
        section, key = dotted.split(".")
        field = Config.model_fields[section].annotation
        inner = field.model_fields[key].annotation if isinstance(value, dict) and field is not None else None
        found[dotted] = inner.model_validate(value) if inner is not None else value
    return found


def with_changes(config: Config, changes: Change) -> Config:
    """The config with dotted keys set; a value that is a section replaces the whole section."""
    sections: dict[str, dict[str, Any]] = {}
    for dotted, value in validate_changes(changes).items():
        section, key = dotted.split(".")
        sections.setdefault(section, {})[key] = value
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=update) for name, update in sections.items()}
    )


def settings_diff(before: Config, after: Config) -> list[str]:
    """The settings that turn one config into the other, as written on the command line."""
    lines: list[str] = []
    for dotted in (key for keys in GROUPS.values() for key in keys):
        section, key = dotted.split(".")
        lines += _differences(dotted, *(getattr(getattr(one, section), key, None) for one in (before, after)))
    return lines


def _differences(dotted: str, before: Any, after: Any) -> list[str]:
    if isinstance(after, BaseModel):
        return [
            line
            for name in type(after).model_fields
            for line in _differences(f"{dotted}.{name}", getattr(before, name), getattr(after, name))
        ]
    return [] if before == after else [f"{dotted}={_text(after)}"]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return "null" if value is None else str(value)
