"""The adapters that `ebbtide serve` has beside a model, by name: of folders in PEFT's format and of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ebbtide.checkpoint.initial import NamedAdapter
from ebbtide.checkpoint.initial_model import check_base, load_weights
from ebbtide.checkpoint.manifest import CheckpointFiles
from ebbtide.config.adapter import is_adapter
from ebbtide.errors import UserError
from ebbtide.model.families import family_of
from ebbtide.model.lora import adapted_layers, add_adapters, base_digest
from ebbtide.model.peft_format import load_adapter
from ebbtide.model.row_adapters import Adapter, join_adapters, take_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_adapters(model: PreTrainedModel, adapters: Sequence[NamedAdapter]) -> int:
    """Gives a model several adapters at once, numbered from 1 in this order. Returns their bytes."""
    if adapted_layers(model):
        raise UserError(
            "`lora`: the model is a run with adapters of its own: serve the model that it was started from, and name"
            " the run among the adapters, as in `lora.mine=RUN`"
        )
    if family_of(model).sparse:
        raise UserError("`lora`: adapters by name for a mixture of experts are not supported: choose a dense model")
    join_adapters(model, [_load(model, one) for one in adapters])
    return sum(layer.lora_A.nbytes + layer.lora_B.nbytes for layer in adapted_layers(model).values())


def _load(model: PreTrainedModel, adapter: NamedAdapter) -> dict[str, Adapter]:
    """The adapter of each layer. The model is left as it was, but frozen."""
    called, place = adapter.called, adapter.lora.adapter
    assert place is not None
    add_adapters(model, adapter.lora, 0, called)
    folder = Path(place).expanduser()
    if is_adapter(folder):
        load_adapter(model, folder, called)
    else:
        check_base(base_digest(model), CheckpointFiles(folder), called)
        load_weights(model, place, f"lora.{adapter.name}", adapters=True, frozen=False)
    found = take_adapters(model)
    for name, one in found.items():
        # A row of another adapter has 0 times these numbers, which would not be 0.
        if not all(torch.isfinite(tensor).all() for tensor in (one.first, one.second)):
            raise UserError(f"{called} has numbers that are not finite, in {name}: choose another adapter")
    return found
