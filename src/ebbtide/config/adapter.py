"""The settings of an adapter in the format of the package `peft`. Imports no torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ebbtide.config.model import LoraConfig
from ebbtide.errors import UserError

CONFIG = "adapter_config.json"
# What an adapter's config may say that changes what it computes or trains, and the values under which it does not.
ORDINARY: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "modules_to_save": ([], None),
    "trainable_token_indices": ([], {}, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": ([], None),
    "layer_replication": ([], None),
    "target_parameters": ([], None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": ([], None),
}


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read_lora_config(folder: Path) -> LoraConfig:
    """The settings of an adapter."""
    called = f"`model.lora.adapter: {folder}`"
    try:
        found = json.loads((folder / CONFIG).read_text())
        if not isinstance(found, dict) or found.get("peft_type") != "LORA":
            raise UserError(f"{called} is not a LoRA adapter: its {CONFIG} does not say `peft_type: LORA`")
        for key, values in ORDINARY.items():
            if key in found and found[key] not in values:
                raise UserError(f"{called} has `{key}: {found[key]}`, which is not supported: choose another adapter")
        targets, excluded = found.get("target_modules"), found.get("exclude_modules") or []
        if targets == "all-linear":
            targets = None
        elif isinstance(targets, str) or isinstance(excluded, str):
            raise UserError(
                f"{called} names its layers by a pattern, which is not supported: list them in its {CONFIG}"
            )
        rank, alpha = int(found["r"]), float(found["lora_alpha"])
        if found.get("use_rslora"):  # Its factor is alpha / sqrt(rank).
            alpha *= math.sqrt(rank)
        last = None if targets is None else sorted({str(name).rpartition(".")[2] for name in targets})
        return LoraConfig(rank=rank, alpha=alpha, targets=last, exclude=[str(name) for name in excluded])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ValidationError) as error:
        raise UserError(f"{called} has no readable {CONFIG}: {' '.join(str(error).split())}") from None
