"""A run that starts from the weights of another: `model.path` names that run's folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ebbtide.checkpoint.contents import CONFIG, read_tree
from ebbtide.checkpoint.manifest import CheckpointFiles, DamagedCheckpoint, first_problem
from ebbtide.checkpoint.resume import FOLDER
from ebbtide.checkpoint.store import list_checkpoints, newest_valid
from ebbtide.config.model import ModelConfig
from ebbtide.config.root import Config
from ebbtide.errors import UserError

if TYPE_CHECKING:
    from torch import nn


def with_runs_as_models(config: Config, say: Callable[[str], None]) -> Config:
    """The config in which a model whose `path` is a run's folder is that run's model, with the weights of its newest
    checkpoint."""
    changes = {}
    for key in type(config).model_fields:
        model = getattr(config, key)
        run = Path(os.path.expanduser(model.path)) if isinstance(model, ModelConfig) and model.path else None
        if run is not None and (run / FOLDER).is_dir():
            changes[key] = _model_of_run(key, model, run, say)
    return config.model_copy(update=changes) if changes else config


def _model_of_run(key: str, model: ModelConfig, run: Path, say: Callable[[str], None]) -> ModelConfig:
    saved = newest_valid(partial(list_checkpoints, run / FOLDER), say)
    if saved is None:
        raise UserError(
            f"`{key}.path: {model.path}` is a run without a complete checkpoint (`ebbtide checkpoints RUN` lists them)"
        )
    tree = read_tree(CheckpointFiles(saved.path)).get("model")
    try:
        then = ModelConfig.model_validate(tree)
    except ValidationError as error:
        raise DamagedCheckpoint(saved.path, f"{CONFIG} is not valid: {first_problem(error)}") from None
    given = {name: getattr(model, name) for name in model.model_fields_set - {"path", "scratch"}}
    say(f"{key}: the weights are those of step {saved.step} of {model.path}")
    return then.model_copy(update={**given, "weights": str(saved.path.resolve())})


def load_weights(model: nn.Module, checkpoint: str) -> None:
    """Replaces the weights of a whole model by those of a checkpoint."""
    import torch

    from ebbtide.checkpoint.tensors import TensorReader

    folder = Path(checkpoint)
    if not folder.is_dir():
        raise UserError(
            f"`model.weights: {checkpoint}` does not exist any more: name the run or checkpoint to start from"
        )
    tensors = TensorReader(CheckpointFiles(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in tensors.weights:
                raise DamagedCheckpoint(folder, f"it lacks model.{name}")
            found = torch.empty(parameter.shape, dtype=tensors.weights[name])
            tensors.read({f"model.{name}": found})
            parameter.copy_(found)
