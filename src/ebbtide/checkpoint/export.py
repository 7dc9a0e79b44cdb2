"""A checkpoint's weights as an ordinary Hugging Face folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ebbtide.checkpoint.contents import read_config
from ebbtide.checkpoint.manifest import Damaged, Listed
from ebbtide.checkpoint.resume import FOLDER
from ebbtide.checkpoint.store import Saved, listed, newest_sound
from ebbtide.checkpoint.tensors import Tensors
from ebbtide.config.tree import Config
from ebbtide.errors import UserError
from ebbtide.policy.model import unfilled_model


def pick(run: Path, step: int | None, say: Callable[[str], None]) -> Saved:
    """A checkpoint of a run: of a step, or the newest that is whole."""

    def look() -> list[Saved]:
        return [saved for saved in listed(run / FOLDER) if step in (None, saved.step)]

    if step is not None and (found := look()):
        if (problem := found[-1].problem()) is not None:
            raise Damaged(found[-1].path, problem)
        return found[-1]
    if (saved := newest_sound(look, say)) is None:
        raise UserError(
            f"{run} has no complete checkpoint"
            + (f" of step {step}" if step is not None else "")
            + " (`ebbtide checkpoints RUN` lists them)"
        )
    return saved


Read = tuple[Saved, PreTrainedModel, PreTrainedTokenizerBase, Config]


def read_newest(run: Path, step: int | None, say: Callable[[str], None]) -> Read:
    """A checkpoint of a run, as `pick` finds it, and its model; another one where the run removes it meanwhile."""
    while True:
        saved = pick(run, step, say)
        try:
            return saved, *read_model(saved)
        except Damaged:
            if step is not None or saved.path.is_dir():
                raise


@torch.no_grad()
def read_model(saved: Saved) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Config]:
    """A checkpoint's model, on the CPU and in the type of its weights, with its tokenizer and the run's config."""
    files = Listed(saved.path)
    config, tensors = read_config(files), Tensors(files)
    model, tokenizer = unfilled_model(config, next(iter(tensors.weights.values())))
    tensors.read({f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()})
    return model, tokenizer, config


def export(run: Path, out: Path, step: int | None = None, say: Callable[[str], None] = print) -> Saved:
    """Writes a checkpoint's model, tokenizer and chat template to a new or empty folder that transformers loads.

    All of them, or none. Gives the checkpoint: that of the step, or the newest.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: choose a folder to export to")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty: choose another folder")
    saved, model, tokenizer, _ = read_newest(run, step, say)
    place = out.resolve()
    making = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))  # a name that nobody else has
        transformers_logging.disable_progress_bar()  # into a pipe it would be a line for each refresh
        model.save_pretrained(making)
        tokenizer.save_pretrained(making)
        _open_to_others(making)
        if place.exists():  # perhaps somebody's working folder: it stays the same one, and is a model with its config.json
            for file in sorted(making.iterdir(), key=lambda file: file.name == "config.json"):
                file.rename(place / file.name)
        else:
            making.rename(place)
    except (OSError, SafetensorError) as problem:
        words = f"the model cannot be written to {out}: {problem}. Make room there, or choose another folder"
        raise UserError(words) from None
    finally:
        if making is not None:
            shutil.rmtree(making, ignore_errors=True)
    return saved


def _open_to_others(folder: Path) -> None:
    """As far as the umask lets them: temporary folders, and files of safetensors, are their owner's alone."""
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~mask)
