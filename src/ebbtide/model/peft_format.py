"""Adapters in the format of the package `peft`: `adapter_config.json` and `adapter_model.safetensors` in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ebbtide.config.adapter import CONFIG
from ebbtide.config.model import LoraConfig
from ebbtide.errors import UserError
from ebbtide.model.lora import adapted_layers, base_digest

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
DIGEST = "ebbtide_base"
"""The key of the file's metadata with a digest of the model that the adapter was trained on."""


@torch.no_grad()
def load_adapter(model: nn.Module, folder: Path, called: str | None = None) -> None:
    """Sets the adapters of a model to those of a folder, which must have exactly its layers. `called`: how an error
    names the folder."""
    called = called or f"`model.lora.adapter: {folder}`"
    parameters = _named(model)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as opened:
            names = set(opened.keys())
            digest = (opened.metadata() or {}).get(DIGEST)
            if digest is not None and digest != base_digest(model):
                raise UserError(
                    f"{called} was trained on another model than the one here: name the one it belongs to, and its"
                    " `model.base` (`base` of `ebbtide serve`), if it was quantized, with the same version of Ebbtide"
                )
            if odd := sorted(names ^ parameters.keys()):
                where = "the model has no such layer" if odd[0] in names else "it lacks it"
                raise UserError(f"{called} does not fit the model: {odd[0]}: {where}")
            for name, parameter in parameters.items():
                tensor = opened.get_tensor(name)
                if tensor.shape != parameter.shape:
                    raise UserError(
                        f"{called} does not fit the model: {name} is {list(tensor.shape)}, not {list(parameter.shape)}"
                    )
                parameter.copy_(tensor)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{called} has no readable {WEIGHTS}: {error}") from None


def write_adapter(model: nn.Module, config: LoraConfig, base: str | None, folder: Path) -> None:
    """Writes the adapters of a model to a folder. `base`: where the model itself is."""
    names = sorted({name.rpartition(".")[2] for name in adapted_layers(model)})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "target_modules": names,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in _named(model).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt", DIGEST: base_digest(model)})
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters by their names in a file."""
    return {
        f"{PREFIX}{name}.{which}.weight": getattr(layer, which)
        for name, layer in adapted_layers(model).items()
        for which in ("lora_A", "lora_B")
    }
