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
from ebbtide.model.quantized_layers import new_quantized_model, quantize_model


def load_initial(config: Config, device: torch.device, *, adapter: bool = True) -> LoadedModel:
    """The model that a run starts with, on a device. Without `adapter`, adapters are new ones: a checkpoint that is
    loaded later has them."""
    model = config.model
    if model.base is not None and model.scratch is not None and model.weights is None:
        loaded = load_model(config, device, new_quantized_model)
    else:
        loaded = load_model(config, device if model.base is None else torch.device("cpu"))
        if model.weights is not None:
            load_weights(loaded.model, model.weights, "model.weights")
        if model.base is not None:
            quantize_model(loaded.model, model.base, device, embeddings=model.base_embeddings)
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
    load_weights(model, adapter, "model.lora.adapter", adapters=True)
    check_base(base_digest(model), CheckpointFiles(folder))


def check_base(base: str, files: CheckpointFiles, called: str = "") -> None:
    """Raises if a checkpoint's adapters belong to another model than the one with this digest. `called`: how the error
    names the checkpoint's key, if there is one."""
    saved = read_run(files).base
    if saved is not None and saved != base:
        raise UserError(
            f"{called}{': ' if called else ''}the adapters in {files.folder} were trained on another model than the one"
            " here: its weights are not the ones that they were saved with. Name the model that the run was started"
            " with, and its `model.base` and `model.base_embeddings` (`base` and `base_embeddings` of `ebbtide serve`),"
            " if it was quantized, with the same version of Ebbtide"
        )


def check_codes(saved: torch.dtype, weight: torch.Tensor, folder: Path) -> None:
    """Raises if a weight or the saved one is codes, and those are of another kind."""
    if saved != weight.dtype and not (saved.is_floating_point and weight.is_floating_point()):
        raise UserError(
            f"the base in {folder} has other codes than this run makes: go on with the `model.base`,"
            " `model.base_embeddings` and version of Ebbtide that it was saved with, or start a new run"
        )


@torch.no_grad()
def load_weights(model: nn.Module, checkpoint: str, key: str, *, adapters: bool = False, frozen: bool = True) -> None:
    """Replaces the weights of a whole model by those of a checkpoint, which `key` names. Of a run with `adapters` it
    has those, and frozen weights only where they are found nowhere else: those are left as they are without
    `frozen`."""
    folder = Path(checkpoint).expanduser()
    if not folder.is_dir():
        raise UserError(f"`{key}: {checkpoint}` does not exist any more: name the run or checkpoint to start from")
    files = CheckpointFiles(folder)
    tensors = TensorReader(files)
    if adapters != (read_run(files).base is not None):
        has = "all weights" if adapters else "adapters (`model.lora`)"
        raise UserError(f"`{key}: {checkpoint}` is a checkpoint of a run that trained {has}: name it in `model.path`")
    for name, parameter in model.named_parameters():
        if not (parameter.requires_grad or frozen):
            continue
        if name in tensors.weights:
            check_codes(tensors.weights[name], parameter, folder)
            found = torch.empty(parameter.shape, dtype=tensors.weights[name])
            tensors.read({f"model.{name}": found})
            parameter.copy_(found)
        elif parameter.requires_grad:
            raise DamagedCheckpoint(folder, f"it lacks model.{name}")
