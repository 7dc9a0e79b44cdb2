"""Writes a trained language part back into the multimodal checkpoint that it was taken from."""

from __future__ import annotations

import shutil
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from ebbtide.config.model import ModelConfig
from ebbtide.config.model_path import locate
from ebbtide.errors import UserError
from ebbtide.model.files import is_language_part
from ebbtide.model.language_part import text_name
from ebbtide.system.transformers_internals import to_checkpoint_format

COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
"""The files of a checkpoint besides its weights: configs, and what its tokenizer and its image processor read."""


def find_full_checkpoint(config: ModelConfig) -> Path:
    """The folder of the multimodal checkpoint that `model.path` names; refuses any other model."""
    if config.path is None or not is_language_part(config):
        raise UserError(
            "`--full` is for a run on the language part of a multimodal model, and the run's `model` is none: leave out"
            " `--full`"
        )
    place = locate(config.path).folder
    if Path(place).is_dir():
        return Path(place)
    return Path(snapshot_download(place, allow_patterns=["*.safetensors", *COPIED]))  # Usually from the hub's cache.


def write_full(model: PreTrainedModel, source: Path, target: Path) -> None:
    """Writes all files of a checkpoint, with the tensors of its language part replaced by those of `model`, in the
    types that they have there."""
    left = to_checkpoint_format(model, {name: tensor.detach() for name, tensor in model.state_dict().items()})
    for pattern in COPIED:
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)
    for file in sorted(source.glob("*.safetensors")):
        tensors: dict[str, Tensor] = {}
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no dict)
                tensors[name] = old = opened.get_tensor(name)
                if (new := left.pop(text_name(name), None)) is not None:
                    if new.shape != old.shape:
                        raise _refusal(source, name)
                    tensors[name] = new.to(old.dtype).contiguous()
        save_file(tensors, target / file.name, metadata={"format": "pt"})
    if model.config.tie_word_embeddings:
        left.pop("lm_head.weight", None)
    if left:
        raise _refusal(source, min(left))


def _refusal(source: Path, name: str) -> UserError:
    return UserError(
        f"{source} does not have the trained tensor {name} in the form in which it would be written: export without"
        " `--full`, which gives the language part as a model of its own"
    )
