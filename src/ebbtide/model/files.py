"""Reads a model's files with transformers: a config, weights or a tokenizer, from a folder, a hub id or a GGUF file.
What is broken, unsafe or of a kind that would be read wrongly is refused."""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ebbtide.config.model import ModelConfig
from ebbtide.config.model_path import check_exists, locate
from ebbtide.errors import UserError
from ebbtide.model.language_part import MULTIMODAL, PREFIXES, is_tied, text_name
from ebbtide.model.tokenizer import scratch_tokenizer
from ebbtide.system.printable import printable_lines
from ebbtide.system.transformers_internals import forget_renaming, log_handlers, needs_own_code

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Exceptions that transformers raises on truncated files or wrong values.
BROKEN = (
    *(OSError, ValueError, LookupError, RuntimeError, TypeError, AttributeError, ArithmeticError),
    *(struct.error, SafetensorError, UnpicklingError, StrictDataclassError),
)
FLOATS = ("F16", "BF16", "F32", "F64")  # dtypes that are not quantized, by their names in safetensors
NO_CODE = {"trust_remote_code": False}
"""An argument for every function of transformers that reads a model: without it transformers asks on stdin whether to
run a folder's own Python code, and a `y` runs it."""


def _escape_controls(record: logging.LogRecord) -> bool:
    """Escapes control characters in transformers' messages, which may contain names from a model's files."""
    record.msg, record.args = printable_lines(record.getMessage()), ()
    return True


transformers_logging.set_verbosity_error()  # Ebbtide explains what is wrong with a model itself.
for handler in log_handlers():
    handler.addFilter(_escape_controls)


def read_pretrained(config: ModelConfig, kind: Any, /, **options: Any) -> Any:
    """A model, config or tokenizer (`kind`) from `model.path`."""
    assert config.path is not None  # The config has exactly one of the two.
    folder, gguf = locate(config.path)
    if gguf is not None:
        options["gguf_file"] = gguf
    # The GGUF reader prints a progress bar over ours.
    with refuse_broken_files(config), redirect_stderr(StringIO()) if gguf else nullcontext():
        return kind.from_pretrained(folder, **NO_CODE, **options)


@contextmanager
def refuse_broken_files(config: ModelConfig) -> Iterator[None]:
    """Inside this context, exceptions of code that reads a model's files become a UserError about `model.path`."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"`model.path: {config.path}` needs a package that is not installed: {error}") from None
    except BROKEN as error:
        _refuse_code(error, f"`model.path: {config.path}`")
        why = str(error).partition("Model type should be one of")[0]  # All of them would follow.
        raise UserError(
            f"`model.path: {config.path}` could not be loaded as a causal language model:"
            f" {' '.join(why.split())} (check the name and the network, or name a local folder)"
        ) from None


def is_language_part(config: ModelConfig) -> bool:
    """Whether the model at `model.path` is multimodal, of which the language part is trained."""
    if config.path is None or locate(config.path).gguf is not None:  # A GGUF file has one part.
        return False
    return read_pretrained(config, AutoConfig).model_type in MULTIMODAL


def read_config(config: ModelConfig) -> PretrainedConfig:
    """The transformers config of the model at `model.path`; of a multimodal one, that of its language part."""
    found: PretrainedConfig = read_pretrained(config, AutoConfig)
    if found.model_type not in MULTIMODAL:
        return found
    assert config.path is not None  # A config was read from there.
    folder = Path(locate(config.path).folder)
    text: PretrainedConfig = found.get_text_config()
    with refuse_broken_files(config):
        text.tie_word_embeddings = is_tied(
            found.tie_word_embeddings, text.tie_word_embeddings, folder if folder.is_dir() else None
        )
    if getattr(found, "quantization_config", None) is not None:
        text.quantization_config = found.quantization_config
    return text


def read_weights(config: ModelConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model at `model.path` on the CPU, and what transformers says of the tensors in its files. Of a multimodal
    model it is the language part."""
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True, "use_safetensors": True}
    if is_language_part(config):
        renamed = {f"^{re.escape(before)}": after for before, after in PREFIXES.items()}
        options |= {"config": read_config(config), "key_mapping": renamed}
    model, info = read_pretrained(config, AutoModelForCausalLM, **options)
    if "key_mapping" in options:
        forget_renaming(model)
    return model, info


def read_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase
    if config.tokenizer is not None:
        check_exists(config.tokenizer, "model.tokenizer")
        try:
            tokenizer = AutoTokenizer.from_pretrained(config.tokenizer, **NO_CODE)
        except (OSError, ValueError) as error:
            _refuse_code(error, f"`model.tokenizer: {config.tokenizer}`")
            raise UserError(
                f"`model.tokenizer: {config.tokenizer}` could not be loaded: {' '.join(str(error).split())}"
            ) from None
    elif config.scratch is not None:
        tokenizer = scratch_tokenizer(config.scratch.alphabet)
    else:
        tokenizer = read_pretrained(config, AutoTokenizer)
    return tokenizer


def _refuse_code(error: Exception, called: str) -> None:
    """Raises a clear error if transformers lacks the permission to run a model's code; its own message names an
    argument that cannot be set here."""
    if needs_own_code(error):
        raise UserError(
            f"{called} needs its own Python code (`auto_map` in its config.json or tokenizer_config.json) for a class"
            " that transformers lacks, and Ebbtide never runs a model's code: choose a model that transformers"
            " supports, or install a newer transformers that supports this one"
        ) from None


def refuse_quantized(config: ModelConfig, weights: set[str]) -> None:
    """Refuses quantized weights whose scales the config does not declare: transformers would use the codes as they
    are."""
    assert config.path is not None  # The caller loads `model.path`.
    place, gguf = locate(config.path)
    folder = Path(place)
    if gguf is not None or not folder.is_dir() or "quantization_config" in read_config(config).to_dict():
        return
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in (name for name in opened.keys() if text_name(name) in weights):  # noqa: SIM118 (no dict)
                if (kind := opened.get_slice(name).get_dtype()) not in FLOATS:
                    raise UserError(
                        f"`model.path: {config.path}` has {name} as {kind} in {file.name}, but its config.json does not"
                        " say how it is quantized: get the model in bfloat16, float16 or float32"
                    )


def refuse_pickles(config: ModelConfig) -> None:
    """Refuses a folder with pickle files only. For a hub id, transformers itself says that there are no
    safetensors."""
    assert config.path is not None  # The caller loads `model.path`.
    place, gguf = locate(config.path)
    folder = Path(place)
    if gguf is not None or not folder.is_dir() or any(folder.glob("*.safetensors*")):
        return
    if found := sorted(folder.glob("pytorch_model*.bin")):
        raise UserError(
            f"`model.path: {config.path}` has its weights in {found[0].name}, a pickle file, which can run code when it"
            " is loaded: only safetensors are read. Get the model as safetensors, or, if you trust it, convert it with"
            " transformers: `AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)`"
        )
