"""Renamed keys, values and metrics: an error names the new key, and what earlier runs wrote is upgraded.

Imports no torch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

RENAMED: Mapping[str, str] = {
    "rollout.prompts": "rollout.prompts_per_step",
    "rollout.samples": "rollout.group_size",
    "rollout.batch": "rollout.max_num_seqs",
    "rollout.ahead": "rollout.partial.extra_prompts",
    "rollout.cache": "rollout.partial.kv_cache",
    "loss.correction.cap": "loss.importance_sampling.high",
    "loss.correction": "loss.importance_sampling",
    "loss.importance_sampling.cap": "loss.importance_sampling.high",
    "advantage.drop_flat_groups": "advantage.drop_zero_std_groups",
    "memory.away": "memory.offload",
    "memory.activations.gate": "memory.activations.on_slow_link",
    "cluster.generate": "parallel.rollout_weights",
    "cluster.tries": "parallel.max_restarts",
    "cluster": "parallel",
    "task.scoring.seconds": "task.scoring.timeout_s",
}
"""Old dotted key -> new dotted key. The keys of a section come before the section."""

METRICS: Mapping[str, str] = {
    "flat_groups": "zero_std_groups",
    "groups_under_way": "unfinished_groups",
    "group_age": "staleness",
    "group_age_max": "staleness_max",
    "clipped": "clip_fraction",
}
"""Old key of metrics.jsonl -> new key."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "checkpoint.metric": METRICS,
    "rollout.partial.kv_cache": {"dropped": "recompute", "kept": "keep"},
    "parallel.rollout_weights": {"whole": "gathered", "layers": "layerwise"},
}
"""New dotted key -> old value -> new value."""


def new_name(keys: Sequence[str]) -> str | None:
    """The current name of a key, if it or a section above it was renamed."""
    dotted = ".".join(keys)
    for old, new in RENAMED.items():
        if dotted == old or dotted.startswith(f"{old}."):
            return new + dotted[len(old) :]
    return None


def upgrade(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The config tree of an earlier run with today's keys and values; an up-to-date tree is returned unchanged."""
    upgraded: dict[str, Any] = {"algorithm": "grpo", **copy.deepcopy(dict(tree))}
    for old, new in RENAMED.items():
        *above, last = old.split(".")
        section = _section(upgraded, above)
        if section is None or last not in section:
            continue
        value = section.pop(last)
        *above, last = new.split(".")
        target = upgraded
        for key in above:
            if not isinstance(target.get(key), dict):
                target[key] = {}
            target = target[key]
        if isinstance(value, dict) and isinstance(target.get(last), dict):
            target[last] |= value
        else:
            target[last] = value
    for key, values in VALUES.items():
        *above, last = key.split(".")
        section = _section(upgraded, above)
        if section is not None and isinstance(value := section.get(last), str):
            section[last] = values.get(value, value)
    return upgraded


def _section(tree: Any, keys: Sequence[str]) -> dict[str, Any] | None:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else None
