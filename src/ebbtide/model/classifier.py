"""Reads a model for sequence classification, such as a reward model, and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PretrainedConfig
from transformers.utils import logging as transformers_logging

from ebbtide.config.model_path import check_exists
from ebbtide.config.rewards import RewardModelConfig
from ebbtide.errors import UserError
from ebbtide.model.files import BROKEN, NO_CODE
from ebbtide.model.load import pick_dtype
from ebbtide.system.transformers_internals import needs_own_code

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

KEY = "task.rewards.NAME.reward_model"


@contextmanager
def _refuse_broken_files(config: RewardModelConfig) -> Iterator[None]:
    """Inside this context, exceptions of code that reads a model's files become a UserError."""
    check_exists(config.path, f"{KEY}.path")
    called = f"`{KEY}.path: {config.path}`"
    try:
        yield
    except ImportError as error:
        raise UserError(f"{called} needs a package that is not installed: {error}") from None
    except BROKEN as error:
        if needs_own_code(error):
            raise UserError(
                f"{called} needs its own Python code, and Ebbtide never runs a model's code: choose a model that"
                " transformers supports"
            ) from None
        why = " ".join(str(error).partition("Model type should be one of")[0].split())
        raise UserError(f"{called} could not be loaded as a model for sequence classification: {why}") from None


def read_classifier_config(config: RewardModelConfig) -> PretrainedConfig:
    """Its transformers config, checked for the output that is the score."""
    with _refuse_broken_files(config):
        found: PretrainedConfig = AutoConfig.from_pretrained(config.path, **NO_CODE)
    kinds = found.architectures or []
    if kinds and not any("SequenceClassification" in kind for kind in kinds):
        raise UserError(
            f"`{KEY}.path: {config.path}` is a {kinds[0]}, and no model for sequence classification: name a reward"
            " model, or serve it and ask it as a `judge`"
        )
    labels = found.num_labels
    if config.label is None and labels != 1:
        raise UserError(
            f"`{KEY}.path: {config.path}` has {labels} outputs: name the one that is the score in `label`, from 0 on"
        )
    if config.label is not None and config.label >= labels:
        raise UserError(f"`{KEY}.label: {config.label}` is none of the model's {labels} outputs, 0 to {labels - 1}")
    if config.transform == "softmax" and labels == 1:
        raise UserError(f"`{KEY}.transform: softmax` of a single output is always 1: use `sigmoid` or `none`")
    return found


def meta_classifier(config: RewardModelConfig, known: PretrainedConfig | None = None) -> PreTrainedModel:
    """The model without memory for its weights. `known`: its transformers config, if its files need not be read."""
    with torch.device("meta"):
        if known is not None:
            return AutoModelForSequenceClassification.from_config(known, **NO_CODE)
        with _refuse_broken_files(config):
            model: PreTrainedModel = AutoModelForSequenceClassification.from_config(
                read_classifier_config(config), **NO_CODE
            )
    return model


def read_classifier(config: RewardModelConfig, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model on the host, in the type that it has on `device`, and its tokenizer."""
    transformers_logging.disable_progress_bar()  # Ebbtide shows its own progress.
    shape = read_classifier_config(config)
    options: dict[str, Any] = {"dtype": pick_dtype(config.dtype, device), "use_safetensors": True, "config": shape}
    with _refuse_broken_files(config):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(config.path, **NO_CODE)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            config.path, output_loading_info=True, **NO_CODE, **options
        )
    if absent := sorted({*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])}):
        raise UserError(
            f"`{KEY}.path: {config.path}` lacks {len(absent)} of the weights of a model for sequence classification"
            f" ({', '.join(absent[:3])}), and they would be random: it is no reward model, or not complete"
        )
    model.eval().requires_grad_(False)
    model.config.use_cache = False
    return model, tokenizer
