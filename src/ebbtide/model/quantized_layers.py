"""A frozen base in 8 or 4 bits (`model.base`): linear layers whose matrices are codes (quantize.py), which are made
when the model is loaded.

Layers that make keys or values are in 8 bits where others are in 4: many query heads read what they make. So is one
that makes queries as well.

Embedding and output head stay as they are unless asked (`model.base_embeddings`): then they are in float8. Their codes
are held as bytes, so that a model's type is that of its other parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from ebbtide.config.model import BaseKind
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.model.families import family_of
from ebbtide.model.files import NO_CODE
from ebbtide.model.load import layers_of, model_config
from ebbtide.model.lora_targets import no_quantized_experts
from ebbtide.model.quantize import Quantized, dequantize, product, quantize
from ebbtide.model.quantized_sizes import layer_kind
from ebbtide.system.transformers_internals import initialize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CASTS_TO_HEAD = ("mamba", "mamba2", "falcon_mamba", "hy_v4", "xlstm")
"""Families of transformers whose forward reads the type of `lm_head.weight`."""
EMBEDDINGS_KEY = "`model.base_embeddings` (`base_embeddings` of `ebbtide serve`)"
SCALE = "weight_scale"
"""The name of a quantized layer's parameter beside `weight`, which are the codes."""


class QuantizedLinear(nn.Linear):
    """A linear layer whose matrix is quantized."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_product(self, x)


class QuantizedEmbedding(nn.Embedding):
    """An embedding whose matrix is quantized, in 8 bits."""

    dense_class: type[nn.Embedding]
    weight_scale: nn.Parameter

    def forward(self, tokens: Tensor) -> Tensor:
        scale = self.weight_scale
        found = self.weight[tokens].view(torch.float8_e4m3fn).to(scale.dtype) * scale[tokens]
        factor = getattr(self, "embed_scale", 1.0)  # Some families multiply embeddings with it.
        return found * (factor.to(found.dtype) if isinstance(factor, Tensor) else factor)


def layer_product(layer: nn.Linear, x: Tensor) -> Tensor:
    """x W.T + bias, of a layer whose matrix may be quantized. Autograd keeps its codes, not its numbers."""
    matrix = quantized_of(layer)
    return functional.linear(x, layer.weight, layer.bias) if matrix is None else product(x, matrix, layer.bias)


def layer_matrix(layer: nn.Linear | nn.Embedding) -> Tensor:
    """The matrix of a layer [N, K], in numbers."""
    matrix = quantized_of(layer)
    return layer.weight if matrix is None else dequantize(matrix, torch.bfloat16)


def count_parameters(model: nn.Module) -> int:
    """The number of a model's parameters; of a quantized matrix the numbers, not the bytes of its codes."""
    found = sum(parameter.numel() for parameter in model.parameters())
    matrices = {id(one.weight): matrix for one in model.modules() if (matrix := quantized_of(one)) is not None}
    for matrix in matrices.values():  # An embedding and an output head may have the same.
        found += len(matrix.codes) * matrix.columns - matrix.codes.numel() - matrix.scale.numel()
    return found


def layer_columns(layer: nn.Linear) -> int:
    """The columns of a layer's matrix."""
    matrix = quantized_of(layer)
    return layer.weight.shape[1] if matrix is None else matrix.columns


def quantized_of(layer: nn.Module) -> Quantized | None:
    """The matrix of a layer, if it is quantized."""
    codes, scale = layer._parameters.get("weight"), layer._parameters.get(SCALE)
    if scale is None or codes is None:
        return None
    is_held_as_bytes = codes.dtype == torch.uint8 and scale.is_floating_point()
    return Quantized(codes.view(torch.float8_e4m3fn) if is_held_as_bytes else codes, scale)


def quantize_model(model: PreTrainedModel, kind: BaseKind, device: torch.device, *, embeddings: bool = False) -> None:
    """Quantizes the linear layers of a model's blocks one by one, with `embeddings` also the embedding and the output
    head, and moves it to a device: no more than the codes, and one layer in numbers, are there at once."""
    if embeddings:
        quantize_embeddings(model, device)
    for layer, own_kind in quantized_layers(model, kind):
        quantize_layer(layer, own_kind, device)
    model.to(device)


def new_quantized_model(config: Config, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model of `model.scratch` with random weights, made and quantized layer by layer on a device."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config(config), dtype=dtype, **NO_CODE)
    assert config.model.base is not None
    kinds: dict[nn.Module, BaseKind] = dict(quantized_layers(model, config.model.base))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        for module in model.modules():
            module.to_empty(device=device, recurse=False)
            initialize(model, module)
            if isinstance(module, nn.Linear) and module in kinds:
                quantize_layer(module, kinds[module], device)
    model.tie_weights()
    if config.model.base_embeddings:
        quantize_embeddings(model, device)
    return model


def quantize_embeddings(model: PreTrainedModel, device: torch.device) -> None:
    """Replaces the matrices of a model's embedding and output head by their codes in float8, on a device."""
    if model.config.model_type in CASTS_TO_HEAD:
        raise UserError(
            f"{EMBEDDINGS_KEY}: {type(model).__name__} casts hidden states to the type of its head's weight, which"
            " would be that of codes: remove it"
        )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_known = type(embedding) is nn.Embedding or hasattr(embedding, "embed_scale")
    if not isinstance(embedding, nn.Embedding) or not is_known or not isinstance(head, nn.Linear):
        raise UserError(
            f"{EMBEDDINGS_KEY} needs an embedding and a linear output head, and {type(model).__name__} has"
            f" {type(embedding).__name__} and {type(head).__name__}: remove it"
        )
    dtype, made = model.dtype, dict[int, tuple[nn.Parameter, nn.Parameter]]()
    for module in (embedding, head):
        key = id(module.weight)
        if key not in made:  # Else it is the same matrix.
            codes, scale = quantize(module.weight.detach().to(device), "float8")
            made[key] = _frozen(codes.view(torch.uint8)), _frozen(scale.to(dtype))
    for module in (embedding, head):
        module.weight, scale = made[id(module.weight)]
        module.register_parameter(SCALE, scale)
    head.__class__ = QuantizedLinear
    own, embedding.__class__ = type(embedding), QuantizedEmbedding
    assert isinstance(embedding, QuantizedEmbedding)
    embedding.dense_class = own


def quantize_layer(layer: nn.Linear, kind: BaseKind, device: torch.device) -> None:
    """Replaces the matrix of a layer by its codes, on a device."""
    codes, scale = quantize(layer.weight.detach().to(device), kind)
    layer.weight = _frozen(codes)
    layer.register_parameter(SCALE, _frozen(scale))
    layer.__class__ = QuantizedLinear


def make_dense(layer: nn.Linear | nn.Embedding, dtype: torch.dtype) -> None:
    """Replaces the codes of a layer by numbers."""
    matrix = layer_matrix(layer)
    layer._parameters.pop(SCALE, None)
    layer.weight = _frozen(matrix.to(dtype))
    if isinstance(layer, QuantizedLinear):
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    elif isinstance(layer, QuantizedEmbedding):
        layer.__class__ = layer.dense_class  # type: ignore[assignment]


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def quantized_layers(model: PreTrainedModel, kind: BaseKind) -> Iterator[tuple[nn.Linear, BaseKind]]:
    """The layers of a model that are quantized, and what each is quantized to."""
    if (family := family_of(model)).sparse:
        raise no_quantized_experts()
    for block in layers_of(model) or ():
        for path, module in block.named_modules():
            if isinstance(module, nn.Linear):
                yield module, layer_kind(path, kind, family)
