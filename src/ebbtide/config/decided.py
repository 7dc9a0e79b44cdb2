"""The settings that a plan may decide: in groups, set by hand or free. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ebbtide.config.tree import Config

Change = Mapping[str, Any]
"""Dotted key -> value."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("optimizer.place", "optimizer.cpu_fraction"),
    "away": ("memory.preset", "memory.away"),
    "activations": ("memory.activations",),
    "gathering": ("cluster.generate",),
    "micro-batch": ("train.microbatch_tokens",),
    "head": ("train.head_chunk_tokens",),
}
"""What is decided together: set one by hand, and the group is left alone."""


def keys_by_hand(config: Config) -> list[str]:
    """What a plan would decide and is set."""
    sections = {name: getattr(config, name) for name in ("optimizer", "memory", "train", "cluster")}
    given = {f"{name}.{key}" for name, section in sections.items() if section is not None for key in section.model_fields_set}
    return [key for keys in GROUPS.values() for key in keys if key in given]


def groups_of(config: Config) -> tuple[str, ...]:
    """The groups that there is something to decide of."""
    gathers = config.cluster is not None and not config.cluster.rollout_gpus
    return tuple(group for group in GROUPS if group != "gathering" or gathers)


def free_groups(config: Config) -> tuple[str, ...]:
    """Of those, the ones of which nothing is set by hand."""
    by_hand = set(keys_by_hand(config))
    return tuple(group for group in groups_of(config) if not by_hand & set(GROUPS[group]))


def as_before(config: Config, then: Mapping[str, Any]) -> Config:
    """For a run that goes on: what a plan had chosen for it stays, where nothing else is set by hand. `then`: the config that it ran with, as a tree."""
    if config.memory.plan != "auto":
        return config
    # How weights are gathered goes by the number of ranks, which may be another now, and changes no bit.
    keys = [key for group in free_groups(config) if group != "gathering" for key in GROUPS[group]]
    chosen = {key: then[section][name] for key in keys for section, name in [key.split(".")] if name in (then.get(section) or {})}
    return with_changes(config, chosen)


def with_chat_date(config: Config, day: object) -> Config:
    """Where none is set, the one given."""
    return config if config.model.chat_date is not None or day is None else with_changes(config, {"model.chat_date": day})


def checked(changes: Change) -> Change:
    """With trees as the sections that they stand for."""
    found = {}
    for dotted, value in changes.items():
        section, key = dotted.split(".")
        field = Config.model_fields[section].annotation
        inner = field.model_fields[key].annotation if isinstance(value, dict) and field is not None else None
        found[dotted] = inner.model_validate(value) if inner is not None else value
    return found


def with_changes(config: Config, changes: Change) -> Config:
    """The config with dotted keys set; a section is replaced whole."""
    sections: dict[str, dict[str, Any]] = {}
    for dotted, value in checked(changes).items():
        section, key = dotted.split(".")
        sections.setdefault(section, {})[key] = value
    return config.model_copy(update={name: getattr(config, name).model_copy(update=update) for name, update in sections.items()})
