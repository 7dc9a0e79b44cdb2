"""The output head of a model: its matrix, which may be quantized, and its product with hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from ebbtide.errors import UserError
from ebbtide.model.linear import linear
from ebbtide.model.quantize import Quantized, linear_in_slices
from ebbtide.model.quantized_layers import quantized_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def head_matrix(model: PreTrainedModel) -> tuple[Tensor | Quantized, Tensor | None]:
    """The output head's matrix [V, H], and its bias, if it has one."""
    head = _head(model)
    return quantized_of(head) or head.weight, _bias(head)


def head_size(model: PreTrainedModel) -> int:
    """The numbers of the output head's matrix."""
    return _head(model).weight.numel()


def head_product(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The output head's product [T, V] with hidden states [T, H]."""
    matrix, bias = head_matrix(model)
    return linear(hidden, matrix, bias) if isinstance(matrix, Tensor) else linear_in_slices(hidden, matrix, bias)


def _head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    if head is None:
        raise UserError(
            f"{type(model).__name__} has no output embedding, so it is not a causal language model: choose another"
            " model"
        )
    return head  # type: ignore[no-any-return]


def _bias(head: nn.Linear) -> Tensor | None:
    return getattr(head, "bias", None)
