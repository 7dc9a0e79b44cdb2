"""A checkpoint's weights as an ordinary Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ebbtide.checkpoint.resume import FOLDER
from ebbtide.checkpoint.state import CONFIG
from ebbtide.checkpoint.store import Saved, listed
from ebbtide.checkpoint.tensors import read_tensors, saved_dtypes
from ebbtide.config.tree import Config
from ebbtide.errors import UserError
from ebbtide.policy.model import unfilled_model


def pick(run: Path, step: int | None) -> Saved:
    """A checkpoint of a run: of a step, or the newest."""
    found = [saved for saved in listed(run / FOLDER) if step in (None, saved.step)]
    if not found:
        raise UserError(
            f"{run} has no complete checkpoint"
            + (f" of step {step}" if step is not None else "")
            + " (`ebbtide checkpoints RUN` lists them)"
        )
    if (problem := found[-1].problem()) is not None:
        raise UserError(f"the checkpoint {found[-1].path} is damaged ({problem}): choose another with `--step`")
    return found[-1]


@torch.no_grad()
def read_model(saved: Saved) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Config]:
    """A checkpoint's model, on the CPU and in the type of its weights, with its tokenizer and the run's config."""
    config = Config.model_validate(yaml.safe_load((saved.path / CONFIG).read_text()))
    model, tokenizer = unfilled_model(config, next(iter(saved_dtypes(saved.path).values())))
    read_tensors({f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}, saved.path)
    return model, tokenizer, config


def export(saved: Saved, out: Path) -> None:
    """Writes model, tokenizer and chat template to a new folder that transformers loads."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: choose a folder to export to")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty: choose another folder")
    model, tokenizer, _ = read_model(saved)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
