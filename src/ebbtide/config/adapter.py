"""The settings of an adapter in the format of the package `peft`. Imports no torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

from pydantic import ValidationError

from ebbtide.config.model import LoraConfig
from ebbtide.errors import UserError

CONFIG = "adapter_config.json"
# Keys that do not change what a trained adapter computes, besides those that are read. Any other that says something is
# refused: peft has many kinds of adapters.
HARMLESS = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "megatron_core", "qalora_group_size", "layers_pattern", "runtime_config"),
}
READ = {"r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora"}
USUAL = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal")}
"""Keys that may have one of these values, besides none at all."""


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read_lora_config(folder: Path, called: str | None = None) -> LoraConfig:
    """The settings of an adapter. `called`: how an error names it."""
    called = called or f"`model.lora.adapter: {folder}`"
    try:
        found = json.loads((folder / CONFIG).read_text())
        if not isinstance(found, dict) or found.get("peft_type") != "LORA":
            raise UserError(f"{called} is not a LoRA adapter: its {CONFIG} does not say `peft_type: LORA`")
        if parameters := found.get("target_parameters"):
            raise UserError(
                f"{called} has `target_parameters: {parameters}`, and experts cannot have adapters yet: choose one for"
                " linear layers alone"
            )
        for key in sorted(found.keys() - HARMLESS - READ):
            if found[key] and found[key] not in USUAL.get(key, ()):
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
