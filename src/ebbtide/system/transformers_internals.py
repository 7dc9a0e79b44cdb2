"""The private and undocumented parts of transformers that Ebbtide uses. Each has a test in
tests/system/test_transformers_internals.py that fails when a new version of transformers changes it.

Everything here is as in transformers 5.22 (constraints.txt). The imports are inside the functions: transformers' code
for models takes seconds to import.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def attention_implementation(config: PretrainedConfig) -> str:
    """The name of the attention function that a model uses. It relies on `config._attn_implementation`, which
    `from_config`, `from_pretrained` and `set_attn_implementation` set."""
    name: str = config._attn_implementation
    return name


def experts_implementation(config: PretrainedConfig) -> str | None:
    """How a model computes its experts (`grouped_mm`, `batched_mm`, `eager`). It relies on
    `config._experts_implementation`."""
    name: str | None = getattr(config, "_experts_implementation", None)
    return name


Experts = Callable[[Any, "Tensor", "Tensor", "Tensor"], "Tensor"]
"""Computes what the experts of a module make of tokens [T, H], from those chosen for each and their weights."""


def grouped_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """transformers' own experts as grouped matmuls. It relies on the name of that function."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    found: Tensor = grouped_mm_experts_forward(module, hidden, chosen, weights)
    return found


def set_experts(model: PreTrainedModel, name: str, experts: Experts) -> None:
    """Lets a model with transformers' grouped experts compute them by another function, under a name of its own. It
    relies on `ExpertsInterface`, where such functions are registered, and on what a module of experts has for them:
    its matrices `gate_up_proj` or `up_proj`, and `down_proj`, their biases with `_bias` at the end, `_apply_gate`,
    `act_fn`, `num_experts`, `has_gate`, `has_bias` and `is_transposed`."""
    from transformers.integrations.moe import ExpertsInterface

    if experts_implementation(model.config.get_text_config()) == "grouped_mm":
        ExpertsInterface.register(name, experts)
        model.set_experts_implementation(name)


def has_post_expert_norm(module: Any) -> bool:
    """Whether what each expert makes of a token is normalized. It relies on the attributes `has_post_expert_norm` and
    `post_expert_norm`, which transformers 5.17 does not have."""
    return bool(getattr(module, "has_post_expert_norm", False))


def is_expert_parallel(module: Any) -> bool:
    """Whether a module has only some of its model's experts. It relies on `_is_expert_parallel`, which
    transformers 5.17 does not have."""
    return bool(getattr(module, "_is_expert_parallel", False))


DELTA_RULE, DELTA_STEP = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
CONVOLUTION, CONV_STEP = "causal_conv1d_fn", "causal_conv1d_update"
"""The functions that layers with states call: the gated delta rule for many tokens and for one, and a convolution for
many and for one."""


def state_function(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """The function of this name that a layer calls, by a kernel if one is installed. It relies on these names in the
    module of the layer's class."""
    methods = (inspect.unwrap(one) for one in vars(type(module)).values() if callable(one))
    calls = any(name in one.__code__.co_names for one in methods if inspect.isfunction(one))
    return inspect.unwrap(type(module).forward).__globals__.get(name) if calls else None


def replace_state_function(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Replaces such a function, for all layers of the class."""
    inspect.unwrap(type(module).forward).__globals__[name] = function


def forget_quantized_file(model: PreTrainedModel) -> None:
    """Lets a model be saved whose weights became numbers when it was loaded from a GGUF file. It relies on
    `hf_quantizer` and `config.quantization_config`, by which transformers knows such a model."""
    if getattr(model, "hf_quantizer", None) is not None:
        model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def forget_renaming(model: PreTrainedModel) -> None:
    """Lets a model be saved with the names that its tensors have in it, not with those that they had in the files that
    it was loaded from. It relies on `_weight_conversions`, which `save_pretrained` reverts."""
    if hasattr(model, "_weight_conversions"):
        del model._weight_conversions


def initialize(model: PreTrainedModel, module: nn.Module) -> None:
    """Gives the weights and buffers of one of a model's modules, without those of its parts, their first values. It
    relies on `_init_weights`."""
    model._init_weights(module)


def full_mask(**wanted: Any) -> Tensor:
    """The boolean mask [batch, 1, queries, keys] that a layer wants, in full even where attention could do without. It
    relies on `sdpa_mask`, on the two arguments by which it leaves masks out, and on transformers calling a registered
    mask function with `sdpa_mask`'s arguments."""
    from transformers.masking_utils import sdpa_mask

    mask: Tensor = sdpa_mask(**{**wanted, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return mask


def is_silu(activation: nn.Module) -> bool:
    """Whether a module is SiLU. It relies on `transformers.activations.SiLUActivation`, the class of models whose
    config says `hidden_act: silu`."""
    from torch import nn
    from transformers.activations import SiLUActivation

    return isinstance(activation, nn.SiLU | SiLUActivation)


def is_gelu_tanh(activation: nn.Module) -> bool:
    """Whether a module is GELU in its approximation by tanh, by torch's kernel. It relies on
    `transformers.activations.GELUTanh`, the class of models whose config says `hidden_act: gelu_pytorch_tanh`, and on
    the function in its `act`."""
    from transformers.activations import GELUTanh

    return isinstance(activation, GELUTanh) and hasattr(activation.act, "func")


def to_checkpoint_format(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some of a model's tensors with the names and shapes that they have in its files, where each expert is a tensor of
    its own. It relies on `revert_weight_conversion`, which `save_pretrained` calls."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return found


def log_handlers() -> list[logging.Handler]:
    """The handlers through which transformers prints its messages. It relies on transformers giving the logger
    `transformers` a handler of its own as soon as its verbosity is set."""
    return logging.getLogger("transformers").handlers


def needs_own_code(error: Exception) -> bool:
    """Whether loading failed because the model needs Python code of its own. It relies on that error's message, which
    names the argument `trust_remote_code`."""
    return "trust_remote_code" in str(error)


def template_variables(tokenizer: PreTrainedTokenizerBase) -> set[str] | None:
    """The variables that a tokenizer's chat template uses and does not set; None if the template cannot be read. It
    relies on `_compile_jinja_template`, whose environment has the statements that templates may use, such as
    `{% generation %}`."""
    from jinja2 import TemplateError
    from jinja2.meta import find_undeclared_variables
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        template = tokenizer.get_chat_template()
        environment = _compile_jinja_template(template).environment
        found: set[str] = find_undeclared_variables(environment.parse(template)) - environment.globals.keys()
        return found
    except (TemplateError, ValueError):
        return None
