"""Loads the policy's model and tokenizer: a Hugging Face folder, a hub id, a GGUF file, or a model built from nothing."""

from __future__ import annotations

import logging
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ebbtide.config.model_path import check_exists, locate
from ebbtide.config.tree import Config
from ebbtide.config.tree import Model as ModelConfig
from ebbtide.errors import UserError
from ebbtide.policy.tokenizer import scratch_tokenizer
from ebbtide.printable import printable_lines

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What reading half a file, or one with wrong values, raises somewhere in transformers.
BROKEN = (
    *(OSError, ValueError, LookupError, RuntimeError, TypeError, AttributeError, ArithmeticError),
    *(struct.error, SafetensorError, UnpicklingError, StrictDataclassError),
)
FLOATS = ("F16", "BF16", "F32", "F64")  # as safetensors names them
NO_CODE = {"trust_remote_code": False}
"""For everything of transformers that reads a model: without it a folder's own Python code is offered on stdin, and a `y` runs it."""


def _shown_not_obeyed(record: logging.LogRecord) -> bool:
    """What transformers says holds names from a model's files."""
    record.msg, record.args = printable_lines(record.getMessage()), ()
    return True


transformers_logging.set_verbosity_error()  # what is wrong with a model is said here, in a sentence
for handler in logging.getLogger("transformers").handlers:
    handler.addFilter(_shown_not_obeyed)


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer, on its device, in its type."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    generate_attention: str
    """Name of the attention that transformers chose for this model: what `generate` uses."""

    @property
    def rows(self) -> int:
        """Of the embedding: token ids are below this. Some tokenizers have added tokens beyond it."""
        rows: int = self.model.get_input_embeddings().weight.shape[0]
        return rows

    @property
    def end_tokens(self) -> list[int]:
        """Every token that ends a completion: a chat model has its end of turn beside its end of text."""
        named = self.model.generation_config.eos_token_id if self.model.generation_config is not None else None
        found = {*(named if isinstance(named, list) else [named]), self.tokenizer.eos_token_id} - {None}
        if odd := [token for token in found if not isinstance(token, int)]:
            raise UserError(
                f"`eos_token_id` of the model's generation_config.json is {odd[0]!r}, and token ids are whole numbers: mend that file"
            )
        return sorted(found)


def pick_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("`device: cuda` and torch sees no GPU: set `device: cpu` or `auto`, or install a torch build for your GPU")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def load_model(config: Config, device: torch.device | None = None) -> Loaded:
    """The configured model, on its device, or elsewhere at first."""
    dtype = pick_dtype(config.model.dtype, pick_device(config.device))
    device = device or pick_device(config.device)
    if config.model.scratch is None:
        loaded = load_pretrained(config.model, device, dtype)
    else:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(config.seed)
            model = AutoModelForCausalLM.from_config(model_config(config), dtype=dtype, **NO_CODE)
        loaded = ready(model, _tokenizer(config.model), config.model)
    context = getattr(loaded.model.config, "max_position_embeddings", None)
    config.check_context(context)
    return loaded


def load_pretrained(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Loaded:
    """The model at `model.path`."""
    tokenizer = _tokenizer(config)
    return ready(_weights(config, dtype).to(device), tokenizer, config)


def _weights(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model at `model.path`, on the CPU, with all that its files hold."""
    transformers_logging.disable_progress_bar()  # our own progress is shown instead
    model: PreTrainedModel
    _refuse_pickles(config)
    model, info = _pretrained(config, AutoModelForCausalLM, dtype=dtype, output_loading_info=True, use_safetensors=True)
    if absent := sorted({*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])}):
        raise UserError(
            f"`model.path: {config.path}` lacks {len(absent)} of the model's weights, or has them in another shape "
            f"({', '.join(absent[:3])}): they would be random. Get the whole model"
        )
    _refuse_codes(config, {name for name, _ in model.named_parameters()})
    for parameter in model.parameters():  # some files hold transposed matrices; optimizer and kernels want rows in order
        parameter.data = parameter.data.contiguous()
    return model


def _refuse_codes(config: ModelConfig, weights: set[str]) -> None:
    """Numbers that stand for others by a scale which the config does not know: transformers would take them as they are."""
    assert config.path is not None  # as above
    place, gguf = locate(config.path)
    folder = Path(place)
    if gguf is not None or not folder.is_dir() or "quantization_config" in _pretrained(config, AutoConfig).to_dict():
        return
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in weights.intersection(opened.keys()):
                if (kind := opened.get_slice(name).get_dtype()) not in FLOATS:
                    raise UserError(
                        f"`model.path: {config.path}` has {name} as {kind} in {file.name}, and its config.json does not say how it is quantized: "
                        "get the model in bfloat16, float16 or float32"
                    )


def _refuse_pickles(config: ModelConfig) -> None:
    """With the way out. Of a hub id transformers says that there are no safetensors."""
    assert config.path is not None  # as above
    place, gguf = locate(config.path)
    folder = Path(place)
    if gguf is not None or not folder.is_dir() or any(folder.glob("*.safetensors*")):
        return
    if found := sorted(folder.glob("pytorch_model*.bin")):
        raise UserError(
            f"`model.path: {config.path}` has its weights in {found[0].name}, a pickle file, "
            "which can run code as it is read: only safetensors are. Get the model with those, or, if you trust it, "
            "write them with transformers: `AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)`"
        )


def ready(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> Loaded:
    """In eval mode: without dropout, so that the trainer's log-probs are the sampler's."""
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # a CPU without bf16 units: slower, as is known, and said in 20 lines
    model.eval()
    loaded = Loaded(model, tokenizer, model.config._attn_implementation)
    _check(loaded, config)
    return loaded


def unfilled_model(config: Config, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The configured model on the CPU with weights that mean nothing yet, and its tokenizer: to be filled from a checkpoint, which has parameters only."""
    shape = model_config(config)
    with torch.device("meta"):
        buffers = _saved_buffers(AutoModelForCausalLM.from_config(shape, **NO_CODE))
    if buffers and config.model.path is not None:  # they are not trained: they are what the run started from
        try:
            model = _weights(config.model, dtype)
        except UserError as error:
            raise UserError(
                f"a checkpoint does not hold buffers, and the model's {len(buffers)} ({', '.join(buffers[:3])}) cannot be read from `model.path` any more: {error}"
            ) from None
    else:
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, **NO_CODE)
    if hasattr(model.config, "quantization_config"):  # of a GGUF file: its weights are no longer quantised
        del model.config.quantization_config
    if config.model.path is not None and (files := locate(config.model.path)).gguf is None:
        with suppress(OSError):  # not every model has one
            model.generation_config = GenerationConfig.from_pretrained(files.folder)
    return model, _tokenizer(config.model)


def _saved_buffers(model: PreTrainedModel) -> list[str]:
    """What a model's files hold beside its parameters: the bias by which some routers choose experts, for one."""
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied head has two names
    return [name for name in model.state_dict() if name not in parameters]


def model_config(config: Config) -> PretrainedConfig:
    """The architecture, without its weights."""
    shape = config.model.scratch
    if shape is None:
        return _pretrained(config.model, AutoConfig)
    tokenizer = _tokenizer(config.model)
    sparse = {"num_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token, "moe_intermediate_size": shape.mlp}
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
        **(sparse if shape.architecture == "qwen3_moe" else {}),
    )


def _pretrained(config: ModelConfig, kind: Any, **options: Any) -> Any:
    """A model, config or tokenizer (`kind`) from `model.path`."""
    assert config.path is not None  # the config holds exactly one of the two
    folder, gguf = locate(config.path)
    if gguf is not None:
        options["gguf_file"] = gguf
    with refusing(config), redirect_stderr(StringIO()) if gguf else nullcontext():  # the GGUF reader draws a bar across ours
        return kind.from_pretrained(folder, **NO_CODE, **options)


@contextmanager
def refusing(config: ModelConfig) -> Iterator[None]:
    """Around code that reads foreign files: what it raises says that they are no model's."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"`model.path: {config.path}` needs a package that is not installed: {error}") from None
    except BROKEN as error:
        _refuse_code(error, f"`model.path: {config.path}`")
        raise UserError(
            f"`model.path: {config.path}` could not be loaded as a causal language model: {' '.join(str(error).split())} "
            "(check the name and the network, or name a local folder)"
        ) from None


def _tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase
    if config.tokenizer is not None:
        check_exists(config.tokenizer, "model.tokenizer")
        try:
            tokenizer = AutoTokenizer.from_pretrained(config.tokenizer, **NO_CODE)
        except (OSError, ValueError) as error:
            _refuse_code(error, f"`model.tokenizer: {config.tokenizer}`")
            raise UserError(f"`model.tokenizer: {config.tokenizer}` could not be loaded: {' '.join(str(error).split())}") from None
    elif config.scratch is not None:
        tokenizer = scratch_tokenizer(config.scratch.alphabet)
    else:
        tokenizer = _pretrained(config, AutoTokenizer)
    return tokenizer


def _refuse_code(error: Exception, called: str) -> None:
    """Says so where what transformers misses is the permission to run code; its own words name an argument that nobody can give here."""
    if "trust_remote_code" in str(error):
        raise UserError(
            f"{called} brings Python code of its own (`auto_map` in its config.json or tokenizer_config.json) for a class that transformers lacks, "
            "and Ebbtide runs none of a model's code: choose a model that transformers has, or a newer transformers that has this one"
        ) from None


def _check(loaded: Loaded, config: ModelConfig) -> None:
    tokenizer, rows = loaded.tokenizer, loaded.rows
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"the tokenizer knows no tokens: `model.path: {config.path}` has no tokenizer files; name one in `model.tokenizer`")
    if tokenizer.vocab_size > rows:  # without added tokens: Gemma 3 1B has one for images that its embedding has no row for
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model's embedding only {rows} rows: they do not belong together; check `model.path` and `model.tokenizer`"
        )
    if (last := max(loaded.end_tokens, default=0)) >= rows:
        raise UserError(
            f"the end token {tokenizer.convert_ids_to_tokens(last)!r} is number {last} and the model's embedding has only {rows} rows: it would never be sampled; check `model.path` and `model.tokenizer`"
        )


def decoder(model: PreTrainedModel) -> torch.nn.Module:
    """The model without its output head: token ids in, last hidden states out."""
    found: torch.nn.Module = model.base_model
    if found is model:  # how transformers answers where a class names a part that it does not have, as Llama 4's does
        family, kind = model.config.model_type, type(model).__name__  # type: ignore[union-attr]
        raise UserError(f"`{family}` cannot be run: {kind} does not say which of its parts is the decoder")
    return found


def blocks_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The model's blocks, first to last."""
    blocks: Any = getattr(decoder(model), "layers", None)
    usual = {"input_layernorm.weight", "post_attention_layernorm.weight", *(f"self_attn.{name}_proj.weight" for name in "qkvo")}
    shapes = [{name for name, _ in block.named_parameters()} for block in blocks] if isinstance(blocks, torch.nn.ModuleList) else []
    if not shapes or any(shape != shapes[0] for shape in shapes) or not shapes[0] >= usual or not hasattr(blocks[0], "mlp"):
        raise UserError(f"{type(model).__name__} has no blocks of the usual shape, all alike: `memory.activations` cannot be set for it")
    return list(blocks)


def head_weight(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """The output head's matrix [V, H] and its bias, if it has one."""
    head = model.get_output_embeddings()
    if head is None:
        raise UserError(f"{type(model).__name__} has no output embedding: it is not a causal language model that can be trained here")
    return head.weight, getattr(head, "bias", None)


def head_shape(config: PretrainedConfig) -> tuple[float, float | None]:
    """(scale, softcap) that this family applies to its logits."""
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    return scale, float(softcap) if softcap is not None else None


def rope_limit(config: PretrainedConfig) -> int | None:
    """The longest sequence with which the rope is the same for all: past it, transformers turns every sequence of a
    batch as the longest one needs. None: there is none."""
    text = config.get_text_config()
    rope: Any = getattr(text, "rope_parameters", None) or {}
    limits = []
    by_layer = [value for value in rope.values() if isinstance(value, dict)]  # some have one for each kind of layer
    for table in (rope, *by_layer):
        kind = str(table.get("rope_type"))
        if kind == "longrope":
            limits.append(int(table.get("original_max_position_embeddings") or text.max_position_embeddings))
        elif "dynamic" in kind:
            limits.append(int(text.max_position_embeddings))
    return min(limits, default=None)
