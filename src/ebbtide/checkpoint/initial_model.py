"""The model that a run starts with: as configured, with the weights of a checkpoint and with adapters where the config
names some."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ebbtide.checkpoint.contents import read_run
from ebbtide.checkpoint.manifest import CheckpointFiles, DamagedCheckpoint
from ebbtide.checkpoint.tensors import TensorReader
from ebbtide.config.adapter import is_adapter
from ebbtide.config.model import ModelConfig
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.model.load import LoadedModel, load_model
from ebbtide.model.lora import add_adapters, base_digest
from ebbtide.model.peft_format import load_adapter


def load_initial(config: Config, device: torch.device, *, adapter: bool = True) -> LoadedModel:
    """The model that a run starts with, on a device. Without `adapter`, adapters are new ones: a checkpoint that is
    loaded later has them."""
    loaded, model = load_model(config, device), config.model
    if model.weights is not None:
        load_weights(loaded.model, model.weights, "model.weights")
    if model.lora is not None:
        add_adapters(loaded.model, model.lora, config.seed)
        if adapter and model.lora.adapter is not None:
            _load_adapter(loaded.model, model.lora.adapter)
    return loaded


def load_frozen(config: Config, model: ModelConfig, device: torch.device) -> LoadedModel:
    """A frozen model on the host. A new one is initialised on `device`: a GPU takes seconds for what takes a CPU
    minutes, and no other model has to have the same bits."""
    start = device if model.scratch is not None else torch.device("cpu")
    loaded = load_initial(config.model_copy(update={"model": model}), start)
    loaded.model.to("cpu")
    return loaded


def _load_adapter(model: nn.Module, adapter: str) -> None:
    folder = Path(adapter).expanduser()
    if is_adapter(folder):
        return load_adapter(model, folder)
    load_weights(model, adapter, "model.lora.adapter")
    check_base(model, CheckpointFiles(folder))


def check_base(model: nn.Module, files: CheckpointFiles) -> None:
    """Raises if a checkpoint's adapters belong to another model than this one, whose frozen weights are its base."""
    saved = read_run(files).base
    if saved is not None and saved != base_digest(model):
        raise UserError(
            f"the adapters in {files.folder} were trained on another model than `model.path`: its weights are not the"
            " ones that they were saved with. Name the model that the run was started with"
        )


@torch.no_grad()
def load_weights(model: nn.Module, checkpoint: str, key: str) -> None:
    """Replaces the weights of a whole model that are trained by those of a checkpoint, which `key` names."""
    folder = Path(checkpoint).expanduser()
    if not folder.is_dir():
        raise UserError(f"`{key}: {checkpoint}` does not exist any more: name the run or checkpoint to start from")
    tensors = TensorReader(CheckpointFiles(folder))
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name not in tensors.weights:
            raise DamagedCheckpoint(folder, f"it lacks model.{name}")
        found = torch.empty(parameter.shape, dtype=tensors.weights[name])
        tensors.read({f"model.{name}": found})
        parameter.copy_(found)
