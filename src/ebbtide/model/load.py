"""Loads the policy's model and tokenizer from a Hugging Face folder, a hub id or a GGUF file, or makes a new model with
random weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ebbtide.config.model import ModelConfig, resolve_dtype
from ebbtide.config.model_path import locate
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.model.chat_template import turn_end
from ebbtide.model.families import family_named, family_of, part_of
from ebbtide.model.files import NO_CODE, read_config, read_tokenizer, read_weights, refuse_pickles, refuse_quantized
from ebbtide.system.transformers_internals import attention_implementation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MakeModel = Callable[[Config, torch.dtype, torch.device], "PreTrainedModel"]


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device and in its type, with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    generate_attention: str
    """The name of the attention implementation that transformers chose for this model; `generate` uses it."""
    turn_end: int | None = None
    """The token with which the chat template ends a turn, where it is used."""

    @property
    def vocabulary_rows(self) -> int:
        """The number of rows of the embedding: token ids are below it. Some tokenizers have added tokens beyond it."""
        rows: int = self.model.get_input_embeddings().weight.shape[0]
        return rows

    @property
    def end_tokens(self) -> list[int]:
        """Every token that ends a completion: those of the model's generation_config.json and the tokenizer's end of
        text, and then the end of a turn by the chat template, which not every generation_config.json names."""
        named = self.model.generation_config.eos_token_id if self.model.generation_config is not None else None
        found = {*(named if isinstance(named, list) else [named]), self.tokenizer.eos_token_id} - {None}
        if odd := [token for token in found if not isinstance(token, int)]:
            raise UserError(
                f"`eos_token_id` in the model's generation_config.json is {odd[0]!r}, and token ids are integers: fix"
                " that file"
            )
        is_other = self.turn_end is not None and self.turn_end not in found and self.turn_end < self.vocabulary_rows
        return [*sorted(found), *([self.turn_end] if is_other else [])]


def pick_device(name: str) -> torch.device:
    """The device that `device` names; raises if it does not exist."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "`device: cuda`, but torch finds no GPU: set `device: cpu` or `auto`, or install a torch build for your GPU"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `model.dtype` names; `auto` depends on the device."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[resolve_dtype(name, device.type)]


def new_model(config: Config, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model of `model.scratch`, with random weights."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(config.seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config(config), dtype=dtype, **NO_CODE)
    return model


def load_model(config: Config, device: torch.device | None = None, make: MakeModel = new_model) -> LoadedModel:
    """The configured model on `device`, by default the configured device. `make` makes a new one."""
    dtype = pick_dtype(config.model.dtype, pick_device(config.device))
    device = device or pick_device(config.device)
    if config.model.scratch is None:
        loaded = load_pretrained(config.model, device, dtype)
    else:
        loaded = prepare_model(make(config, dtype, device), read_tokenizer(config.model), config.model)
    context = getattr(loaded.model.config, "max_position_embeddings", None)
    config.check_context(context)
    return loaded


def load_pretrained(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """The model at `model.path`."""
    tokenizer = read_tokenizer(config)
    return prepare_model(_weights(config, dtype).to(device), tokenizer, config)


def _weights(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model at `model.path` on the CPU, with all of its weights."""
    transformers_logging.disable_progress_bar()  # Ebbtide shows its own progress.
    refuse_pickles(config)
    model, info = read_weights(config, dtype)
    if absent := sorted({*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])}):
        raise UserError(
            f"`model.path: {config.path}` lacks {len(absent)} of the model's weights, or has them in another shape "
            f"({', '.join(absent[:3])}), and they would be random: download the complete model"
        )
    refuse_quantized(config, {name for name, _ in model.named_parameters()})
    # Some files have transposed matrices; the optimizer and the kernels need contiguous ones.
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    return model


def prepare_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> LoadedModel:
    """The model in eval mode, without dropout, so that the trainer's log-probs match the sampler's."""
    # On a CPU without bf16 units this warning has 20 lines, and its only content is that matmuls are slow.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    model.eval()
    loaded = LoadedModel(model, tokenizer, attention_implementation(model.config), turn_end(tokenizer, config))
    _check(loaded, config)
    return loaded


def uninitialized_model(config: Config, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The configured model on the CPU with uninitialized weights, and its tokenizer. The weights are loaded later
    from a checkpoint, which has parameters only."""
    shape = model_config(config)
    with torch.device("meta"):
        buffers = _saved_buffers(AutoModelForCausalLM.from_config(shape, **NO_CODE))
    if buffers and config.model.path is not None:  # Buffers are not trained: they are those of the initial model.
        try:
            model = _weights(config.model, dtype)
        except UserError as error:
            raise UserError(
                f"a checkpoint does not contain buffers, and the model's {len(buffers)} ({', '.join(buffers[:3])})"
                f" cannot be read from `model.path` any more: {error}"
            ) from None
    else:
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, **NO_CODE)
    if hasattr(model.config, "quantization_config"):  # From a GGUF file, whose weights are no longer quantized.
        del model.config.quantization_config
    if config.model.path is not None and (files := locate(config.model.path)).gguf is None:
        with suppress(OSError):  # Not every model has a generation_config.json.
            model.generation_config = GenerationConfig.from_pretrained(files.folder)
    return model, read_tokenizer(config.model)


def _saved_buffers(model: PreTrainedModel) -> list[str]:
    """The names of the buffers in a model's files, such as the bias by which some routers choose experts."""
    parameters = dict(model.named_parameters(remove_duplicate=False))  # A tied head has two names.
    return [name for name in model.state_dict() if name not in parameters]


def model_config(config: Config) -> PretrainedConfig:
    """The transformers config of the model, without weights."""
    shape = config.model.scratch
    if shape is None:
        return read_config(config.model)
    tokenizer = read_tokenizer(config.model)
    sparse = {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.mlp,
    }
    return AutoConfig.for_model(
        shape.architecture,
        vocab_size=shape.vocabulary or len(tokenizer),
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim or shape.hidden // shape.heads,
        intermediate_size=shape.mlp,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **(sparse if family_named(shape.architecture).sparse else {}),
    )


def _check(loaded: LoadedModel, config: ModelConfig) -> None:
    tokenizer, rows = loaded.tokenizer, loaded.vocabulary_rows
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(
            f"the tokenizer has no tokens: `model.path: {config.path}` has no tokenizer files; set `model.tokenizer`"
        )
    # Added tokens do not count: Gemma 3 1B has one for images without a row in its embedding.
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model's embedding only {rows} rows: they do not"
            " belong together; check `model.path` and `model.tokenizer`"
        )
    if (last := max(loaded.end_tokens, default=0)) >= rows:
        raise UserError(
            f"the end token {tokenizer.convert_ids_to_tokens(last)!r} has the id {last}, but the model's embedding has"
            f" only {rows} rows: it would never be sampled; check `model.path` and `model.tokenizer`"
        )


def decoder(model: PreTrainedModel) -> torch.nn.Module:
    """The model without its output head: token ids in, last hidden states out."""
    # Llama 4's class names a part that it lacks, and so transformers says that it is the model itself.
    found: Any = model.base_model if model.base_model is not model else getattr(model, "model", None)
    if not isinstance(found, torch.nn.Module):
        called = f"`{model.config.model_type}` cannot be run: {type(model).__name__}"
        raise UserError(f"{called} does not say which of its parts is the decoder: choose another model")
    return found


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList | None:
    """The list of the model's blocks, first to last, of whatever structure; None if it has no list where its family, or
    most families, have one."""
    found = part_of(decoder(model), family_of(model).layers)
    return found if isinstance(found, torch.nn.ModuleList) else None


def blocks_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The model's blocks, first to last, of whatever structure."""
    if not (found := layers_of(model)):
        raise UserError(
            f"{type(model).__name__} has no list of blocks where other families have one, so `memory.activations`"
            " cannot be set for it: remove that section"
        )
    return list(found)


def logit_scaling(config: PretrainedConfig) -> tuple[float, float | None]:
    """The scale of this family's logits, and their softcap if there is one."""
    text = config.get_text_config()
    scale = float(getattr(text, "logit_scale", None) or 1.0)  # Cohere
    scale *= float(getattr(text, "lm_head_multiplier", None) or 1.0)  # Falcon-H1
    other = float(getattr(text, "logits_scaling", None) or 1.0)
    scale = scale * other if text.model_type == "hyperclovax" else scale / other  # Granite divides
    softcap = getattr(text, "final_logit_softcapping", None)  # Gemma 2
    return scale, float(softcap) if softcap is not None else None


def rope_limit(config: PretrainedConfig) -> int | None:
    """The longest sequence whose rotary embeddings do not depend on the rest of the batch: beyond it, transformers
    rotates every sequence of a batch as the longest one needs. None if there is no such limit."""
    text = config.get_text_config()
    rope: Any = getattr(text, "rope_parameters", None) or {}
    limits = []
    by_layer = [value for value in rope.values() if isinstance(value, dict)]  # Some have one for each kind of layer.
    for table in (rope, *by_layer):
        kind = str(table.get("rope_type"))
        if kind == "longrope":
            limits.append(int(table.get("original_max_position_embeddings") or text.max_position_embeddings))
        elif "dynamic" in kind:
            limits.append(int(text.max_position_embeddings))
    return min(limits, default=None)
