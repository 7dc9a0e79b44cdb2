"""Exports a checkpoint's model as an ordinary Hugging Face folder."""

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
from ebbtide.checkpoint.export_full import find_full_checkpoint, write_full
from ebbtide.checkpoint.initial_model import check_base, load_initial, load_weights
from ebbtide.checkpoint.manifest import CheckpointFiles, DamagedCheckpoint
from ebbtide.checkpoint.resume import FOLDER
from ebbtide.checkpoint.store import Checkpoint, list_checkpoints, newest_valid
from ebbtide.checkpoint.tensors import TensorReader
from ebbtide.config.adapter import CONFIG as ADAPTER_CONFIG
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.model.files import is_language_part
from ebbtide.model.load import prepare_model, uninitialized_model
from ebbtide.model.lora import base_digest, merge_adapters
from ebbtide.model.peft_format import write_adapter
from ebbtide.system.transformers_internals import forget_quantized_file

CPU = torch.device("cpu")


def pick_checkpoint(run: Path, step: int | None, say: Callable[[str], None]) -> Checkpoint:
    """The checkpoint of a run at a step, or the newest that is valid."""

    def look() -> list[Checkpoint]:
        return [saved for saved in list_checkpoints(run / FOLDER) if step in (None, saved.step)]

    if step is not None and (found := look()):
        if (problem := found[-1].find_problem()) is not None:
            raise DamagedCheckpoint(found[-1].path, problem)
        return found[-1]
    if (saved := newest_valid(look, say)) is None:
        raise UserError(
            f"{run} has no complete checkpoint"
            + (f" of step {step}" if step is not None else "")
            + " (`ebbtide checkpoints RUN` lists them)"
        )
    return saved


LoadedCheckpoint = tuple[Checkpoint, PreTrainedModel, PreTrainedTokenizerBase, Config]


def read_newest(
    run: Path, step: int | None, say: Callable[[str], None], device: torch.device = CPU
) -> LoadedCheckpoint:
    """The checkpoint that `pick_checkpoint` finds, with its model. If the run removes it meanwhile, a newer one is
    read."""
    while True:
        saved = pick_checkpoint(run, step, say)
        try:
            return saved, *read_model(saved, device)
        except DamagedCheckpoint:
            if step is not None or saved.path.is_dir():
                raise


@torch.no_grad()
def read_model(
    saved: Checkpoint, device: torch.device = CPU
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Config]:
    """A checkpoint's model, on the CPU and in the dtype of its weights, with its tokenizer and the run's config. A base
    that is quantized anew is on `device`: a GPU takes seconds for what takes a CPU minutes."""
    files = CheckpointFiles(saved.path)
    config, tensors = read_config(files), TensorReader(files)
    if config.model.lora is not None:  # The checkpoint has the adapters, and their base is where the run found it.
        # A base that was saved beside them may have codes.
        dtype = next(dtype for name, dtype in tensors.weights.items() if name.endswith(".lora_A"))
        there = config.model.model_copy(update={"dtype": str(dtype).removeprefix("torch.")})
        settings = config.model_copy(update={"model": there, "device": "cpu"})
        loaded = load_initial(settings, CPU if config.model.base is None else device, adapter=False)
        load_weights(loaded.model, str(saved.path), "run", adapters=True)
        check_base(base_digest(loaded.model), files)
        return loaded.model, loaded.tokenizer, config
    model, tokenizer = uninitialized_model(config, next(iter(tensors.weights.values())))
    tensors.read({f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()})
    return model, tokenizer, config


def export(
    run: Path,
    out: Path,
    step: int | None = None,
    say: Callable[[str], None] = print,
    *,
    merge: bool = False,
    full: bool = False,
) -> Checkpoint:
    """Writes a checkpoint's model, tokenizer and chat template to a new or empty folder that transformers can load. Of
    a run with adapters it is those, in PEFT's format; with `merge` the model with them. Of the language part of a
    multimodal model it is that part; with `full` the whole model with it.

    Either all files are written or none. Returns the checkpoint: the one of the step, or the newest.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: name a folder to export to")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty: choose another folder")
    saved, model, tokenizer, config = read_newest(run, step, say)
    lora, base = config.model.lora, config.model.path if config.model.weights is None else None
    if merge and lora is not None:
        lost = merge_adapters(model)
        kind = str(model.dtype).removeprefix("torch.")
        say(f"merged the adapters into the weights in {kind}, which rounded away {lost:.2%} of what they add")
    elif lora is not None and config.model.weights is not None:
        say(
            f"the adapter's base is not a model of its own, but one with the weights of {config.model.weights}: export"
            " with `--merge` to have one model"
        )
    elif merge:
        raise UserError(f"{run} has no adapters (`model.lora`) to merge: leave out `--merge`")
    if lora is not None and not merge and config.model.base is not None:
        say(
            f"the adapter was trained beside weights in {config.model.base} (`model.base`), and adds to others"
            " elsewhere: export with `--merge` to have the model that was trained"
        )
    if lora is not None and not merge and is_language_part(config.model):
        say(
            f"the adapter is for the language part of {config.model.path} alone, which is not what every tool loads"
            " from there: export with `--merge` to have one model"
        )
    if full and lora is not None and not merge:
        raise UserError("`--full` writes weights, and the run has adapters: export with `--merge --full`")
    whole = find_full_checkpoint(config.model) if full else None
    target = out.resolve()
    unfinished = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))  # a unique name
        transformers_logging.disable_progress_bar()  # in a pipe it would print a line for each refresh
        if lora is not None and not merge:
            write_adapter(model, lora, base, unfinished)
        else:
            forget_quantized_file(model)
            _name_end_tokens(model, tokenizer, config)
            if whole is None:
                model.save_pretrained(unfinished)
            else:
                write_full(model, whole, unfinished)
                if model.generation_config is not None:
                    model.generation_config.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        _apply_umask(unfinished)
        # An existing folder may be somebody's working directory, so it is not replaced. config.json comes last: with it
        # the folder is a model.
        if target.exists():
            for file in sorted(unfinished.iterdir(), key=lambda file: file.name in ("config.json", ADAPTER_CONFIG)):
                file.rename(target / file.name)
        else:
            unfinished.rename(target)
    except (OSError, SafetensorError) as problem:
        raise UserError(
            f"the model cannot be written to {out}: {problem}. Make room there, or choose another folder"
        ) from None
    finally:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
    return saved


def _name_end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: Config) -> None:
    """Writes all tokens that ended a completion in the run into the model's generation config, where other tools look
    for them."""
    ends = prepare_model(model, tokenizer, config.model).end_tokens
    if ends and model.generation_config is not None:
        model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]


def _apply_umask(folder: Path) -> None:
    """Gives the files the permissions of the umask: temporary folders and safetensors files are readable by their owner
    only."""
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~mask)
