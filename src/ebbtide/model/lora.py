"""LoRA: low-rank adapters beside the linear layers of a frozen model. Trainer and sampler compute with the same
adapters; nothing is merged while a run trains."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from ebbtide.config.model import LoraConfig
from ebbtide.config.root import Config
from ebbtide.model.families import family_of
from ebbtide.model.load import layers_of
from ebbtide.model.lora_targets import check_targets
from ebbtide.model.quantized_layers import (
    QuantizedEmbedding,
    QuantizedLinear,
    layer_matrix,
    layer_product,
    make_dense,
    quantized_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEAST_LEARNING_RATE = 5e-6  # Below it a run is told that adapters need more.
AT_ONCE = 2**22  # Numbers that are summed at once.
DIGESTED = 4096  # Numbers of each tensor that the digest of a base has, besides their sum.


class LoraLinear(nn.Linear):
    """A linear layer with an adapter: x W.T + scale (x A.T) B.T. Its own weight keeps its name."""

    lora_A: nn.Parameter  # [rank, in]  # noqa: N815 (the names that everybody knows)
    lora_B: nn.Parameter  # [out, rank]  # noqa: N815
    scale: float
    is_on: bool

    def forward(self, x: Tensor) -> Tensor:
        found = layer_product(self, x)
        if not self.is_on:
            return found
        return torch.add(found, functional.linear(functional.linear(x, self.lora_A), self.lora_B), alpha=self.scale)


def add_adapters(model: PreTrainedModel, config: LoraConfig, seed: int, called: str = "`model.lora`") -> None:
    """Freezes a model and gives its linear layers adapters. A is random, by the seed alone; B is 0, so that the model
    still computes what it did. `called`: how an error names the adapters."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for module in find_targets(model, config, called).values():
        weight = module.weight
        shapes = (config.rank, module.in_features), (module.out_features, config.rank)
        first, second = (torch.zeros(shape, dtype=model.dtype, device=weight.device) for shape in shapes)
        if not weight.is_meta:
            made = nn.init.kaiming_uniform_(torch.empty(shapes[0]), math.sqrt(5), generator=generator)  # As PEFT does.
            first.copy_(made)
        module.__class__ = LoraLinear
        assert isinstance(module, LoraLinear)
        module.lora_A, module.lora_B = nn.Parameter(first), nn.Parameter(second)
        module.scale, module.is_on = config.alpha / config.rank, True


def find_doubts(config: Config) -> list[str]:
    """What to say of settings that suit the training of all weights, and not that of adapters."""
    model, found = config.model, []
    if model.lora is not None and config.optimizer.lr < LEAST_LEARNING_RATE:
        found.append(
            f"`optimizer.lr: {config.optimizer.lr:g}` is little for adapters (`model.lora`), which need about ten times"
            " what all weights need"
        )
    if model.lora is not None and model.scratch is not None and model.weights is None:
        found.append(
            "adapters (`model.lora`) beside random weights (`model.scratch`), which are frozen, learn next to nothing:"
            " set `model.path` to a trained model or run, and `model.scratch=null`"
        )
    return found


def find_targets(model: PreTrainedModel, config: LoraConfig, called: str) -> dict[str, nn.Linear]:
    """Name -> each linear layer of the blocks that gets an adapter."""
    family = family_of(model)
    inside = set((layers_of(model) or nn.ModuleList()).modules())
    linear = {
        name: module
        for name, module in model.named_modules()
        if module in inside and isinstance(module, nn.Linear) and (not family.sparse or name.endswith(family.adaptable))
    }
    wanted = check_targets(config, {name.rpartition(".")[2] for name in linear}, called, sparse=family.sparse)
    return {name: module for name, module in linear.items() if name.rpartition(".")[2] in wanted}


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Name -> each layer that has an adapter."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside this context the model computes as if it had no adapters."""
    layers = [*adapted_layers(model).values()]
    before = [layer.is_on for layer in layers]
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer, was_on in zip(layers, before, strict=True):
            layer.is_on = was_on


def _added(layer: LoraLinear) -> Tensor:
    """What its adapter adds to a layer's weight, in float32."""
    return layer.scale * (layer.lora_B.float() @ layer.lora_A.float())


@torch.no_grad()
def merged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The names and tensors of a model as if its adapters were merged: in float32, and rounded once. The model stays as
    it is; a tensor that has an adapter is made when it is asked for."""
    layers = adapted_layers(model)
    for name, tensor in model.state_dict().items():
        path, _, last = name.rpartition(".")
        if path in layers and last == "weight":
            yield name, (tensor.float() + _added(layers[path])).to(tensor.dtype)
        elif path not in layers or last not in ("lora_A", "lora_B"):
            yield name, tensor


def remove_adapter(layer: LoraLinear) -> None:
    """Makes it a linear layer without an adapter."""
    del layer.lora_A, layer.lora_B
    layer.__class__ = nn.Linear if quantized_of(layer) is None else QuantizedLinear  # type: ignore[assignment]


@torch.no_grad()
def merge_adapters(model: PreTrainedModel) -> float:
    """Adds what the adapters add to the weights, in float32 and rounded once, and removes them; quantized layers are
    numbers from then on. Returns the rounding: the norm of what it changed, as a fraction of the norm of what the
    adapters add."""
    lost, added, dtype = 0.0, 0.0, model.dtype
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    for layer in adapted_layers(model).values():
        update = _added(layer)
        exact = layer_matrix(layer).float() + update
        if quantized_of(layer) is not None:
            make_dense(layer, layer.lora_A.dtype)
        layer.weight.copy_(exact)
        lost += float((layer.weight.float() - exact).square().sum())
        added += float(update.square().sum())
        remove_adapter(layer)
    for module in model.modules():  # those without adapters
        if isinstance(module, (QuantizedLinear, QuantizedEmbedding)):
            make_dense(module, dtype)
    if is_tied:
        head.weight = embedding.weight
    return math.sqrt(lost / added) if added else 0.0


Digested = tuple[int, Tensor]
"""What a digest has of a tensor, in bfloat16: the sum of its numbers' bits, and the bits of some of them [n] int16."""


@torch.no_grad()
def base_digest(model: nn.Module, read: Callable[[Tensor], Digested] | None = None) -> str:
    """A digest of the frozen weights, by which a checkpoint of adapters knows the model that they belong to: of each
    tensor, in bfloat16, the sum of its numbers' bits, and some of them. It is quick where a digest of all bytes takes
    minutes, and the same whatever type the model is loaded in. `read`: how a tensor of which there is a part here is
    read."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            total, some = (read or _read)(parameter.detach())
            # A storage that numpy has seen cannot be resized any more, as holdings that move are.
            found.update(f"{name} {tuple(parameter.shape)} {total}".encode() + some.cpu().clone().numpy().tobytes())
    return found.hexdigest()


def _read(tensor: Tensor) -> Digested:
    return int(sum_of_bits(tensor)), bits_of(tensor.reshape(-1)[:: digested_step(tensor.numel())])


def sum_of_bits(tensor: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in tensor.reshape(-1).split(AT_ONCE):  # A sum makes a copy of what it adds.
        total += bits_of(part).sum(dtype=torch.int64)
    return total


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().view(torch.int16)


def digested_step(numel: int) -> int:
    """A digest has the bits of one in so many of a tensor's numbers."""
    return max(1, numel // DIGESTED)
