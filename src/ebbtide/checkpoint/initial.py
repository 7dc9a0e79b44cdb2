"""Runs and adapters as models: a run that starts from the weights of another, and adapters that are served by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from ebbtide.checkpoint.contents import CONFIG, RUN, read_tree
from ebbtide.checkpoint.manifest import CheckpointFiles, DamagedCheckpoint, first_problem
from ebbtide.checkpoint.resume import FOLDER
from ebbtide.checkpoint.store import list_checkpoints, newest_valid
from ebbtide.config.adapter import CONFIG as ADAPTER_CONFIG
from ebbtide.config.adapter import is_adapter, read_lora_config
from ebbtide.config.model import LoraConfig, ModelConfig
from ebbtide.config.root import Config
from ebbtide.errors import UserError


def with_runs_as_models(config: Config, say: Callable[[str], None]) -> Config:
    """The config in which a model whose `path` is a run's folder is that run's model, with the weights of its newest
    checkpoint."""
    changes = {}
    for key in type(config).model_fields:
        model = getattr(config, key)
        if not isinstance(model, ModelConfig):
            continue
        run = Path(os.path.expanduser(model.path)) if model.path else None
        if run is not None and (run / FOLDER).is_dir():
            changes[key] = _model_of_run(key, model, run, say)
        elif model.lora is not None and model.lora.adapter is not None:
            if config.resume is not None and not Path(os.path.expanduser(model.lora.adapter)).exists():
                continue  # The checkpoint has the adapters, and the run's config.yaml their settings.
            changes[key] = model.model_copy(update={"lora": _with_adapters_settings(key, model.lora, say)})
    if not changes:
        return config
    found = config.model_copy(update=changes)
    try:  # What does not go together with the model of a run is found out here.
        type(config).model_validate(found.model_dump(exclude_unset=True))
    except ValidationError as error:
        raise UserError(first_problem(error)) from None
    return found


def _model_of_run(key: str, model: ModelConfig, run: Path, say: Callable[[str], None]) -> ModelConfig:
    saved = newest_valid(partial(list_checkpoints, run / FOLDER), say)
    if saved is None:
        raise UserError(
            f"`{key}.path: {model.path}` is a run without a complete checkpoint (`ebbtide checkpoints RUN` lists them)"
        )
    then = _saved_model(saved.path)
    given = {name: getattr(model, name) for name in model.model_fields_set - {"path", "scratch"}}
    say(f"{key}: the weights are those of step {saved.step} of {model.path}")
    place = str(saved.path.resolve())
    if then.lora is None:
        return then.model_copy(update={**given, "weights": place})
    if "lora" in given:
        raise UserError(
            f"`{key}.path: {model.path}` is a run with adapters, which are trained further: remove `{key}.lora`. To"
            f" train others on top of them, name what `ebbtide export --merge {model.path} FOLDER` writes"
        )
    return then.model_copy(update={**given, "lora": then.lora.model_copy(update={"adapter": place})})


def _saved_model(checkpoint: Path) -> ModelConfig:
    """The model of the run that a checkpoint is of."""
    tree = read_tree(CheckpointFiles(checkpoint)).get("model")
    try:
        return ModelConfig.model_validate(tree)
    except ValidationError as error:
        raise DamagedCheckpoint(checkpoint, f"{CONFIG} is not valid: {first_problem(error)}") from None


def _with_adapters_settings(key: str, lora: LoraConfig, say: Callable[[str], None]) -> LoraConfig:
    """The settings of the adapter that a run starts from: those of a folder in PEFT's format, or of a run."""
    assert lora.adapter is not None  # The caller has looked.
    called = f"`{key}.lora.adapter: {lora.adapter}`"
    found, _ = find_adapter(lora.adapter, called, f"`{key}.path`", say)
    for name in ("rank", "alpha", "targets", "exclude"):
        mine, theirs = getattr(lora, name), getattr(found, name)
        if name in lora.model_fields_set and mine != theirs:
            raise UserError(
                f"`{key}.lora.{name}` is {mine}, and that of the adapter in {found.adapter} is {theirs}: remove it"
            )
    return found


def find_adapter(
    place: str, called: str, instead: str, say: Callable[[str], None]
) -> tuple[LoraConfig, ModelConfig | None]:
    """(the settings of the adapter at a place, with the place itself; the model of the run that it is of, if it is of
    one). `called` is how an error names it, and `instead` where a run that trained all weights is named."""
    folder = Path(os.path.expanduser(place))
    if is_adapter(folder):
        return read_lora_config(folder, called).model_copy(update={"adapter": place}), None
    saved = newest_valid(partial(list_checkpoints, folder / FOLDER), say)
    folder = saved.path if saved is not None else folder
    if not (folder / RUN).is_file():
        raise UserError(f"{called} is neither a folder with an {ADAPTER_CONFIG} nor a run or a checkpoint of one")
    model = _saved_model(folder)
    if model.lora is None:
        raise UserError(f"{called} is of a run that trained all weights: name it in {instead}")
    return model.lora.model_copy(update={"adapter": str(folder.resolve())}), model


class NamedAdapter(NamedTuple):
    """An adapter that is served under a name of its own."""

    name: str
    lora: LoraConfig
    """Its settings, with where it is (`adapter`)."""
    is_templated: bool
    """Whether chats are rendered with the chat template: not where it was trained without."""
    template_arguments: Mapping[str, Any]
    """The arguments of the chat template with which it was trained."""
    called: str
    """How an error names it."""


def find_adapters(places: Mapping[str, str], say: Callable[[str], None]) -> list[NamedAdapter]:
    """The adapters of `lora` of `ebbtide serve`."""
    found = []
    for name, place in places.items():
        called = f"`lora.{name}: {place}`"
        lora, model = find_adapter(place, called, "place of the model: `ebbtide serve RUN`", say)
        templated, arguments = (True, {}) if model is None else (model.chat_template, model.chat_template_kwargs)
        found.append(NamedAdapter(name, lora, templated, arguments, called))
    return found
