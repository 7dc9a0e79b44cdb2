"""Checks layer by layer that packed sequences do not see each other: the outputs of one have no gradient in the other.

Between separate sequences the gradient is exactly zero, in any type and with any weights, and however small the effect
of a convolution, a state or an attention that crosses sequences would be, it is not zero then. It does not see choices
without a gradient, such as experts that drop tokens where others took their place: packed_check.py sees those.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebbtide.errors import UserError
from ebbtide.model.load import decoder

_STATEFUL = re.compile("mamba|ssm|delta|rwkv|recurrent|linearattention|lightning|retention", re.IGNORECASE)
_STATE_WEIGHTS = {"A_log", "dt_bias", "time_decay"}


NOT_COMPUTED = {
    "index_topk": "an indexer chooses the keys that each token attends to, which is not computed here",
    "index_topk_blocks": "an indexer chooses the keys that each token attends to, which is not computed here",
    "ngram_size": "its embeddings depend on the tokens before, which are not kept apart here",
}
"""A key of configs -> what a family that has it computes. Without it the reason would be whatever failed first."""


def not_packable(model: PreTrainedModel, why: str) -> UserError:
    """The error for a model that cannot be run on packed sequences."""
    config = model.config.get_text_config()
    why = next((known for key, known in NOT_COMPUTED.items() if getattr(config, key, None)), why)
    return UserError(f"`{config.model_type}` cannot be run on packed sequences ({why}): choose another model")


def not_finite(block: nn.Module) -> UserError:
    """The error for a block that computes NaN or Inf."""
    broken = [name for name, weight in block.named_parameters() if not weight.isfinite().all()]
    what = f"its weight {broken[0]} has some" if broken else "but all of its weights are finite: check the config.json"
    return UserError(
        f"a {type(block).__name__} of the model computes numbers that are not finite (NaN or Inf), {what}: the model is"
        " damaged, or diverged in its training. Download it again"
    )


def layer_list(model: PreTrainedModel) -> nn.ModuleList:
    """The list of the model's layers, in whatever structure."""
    layers = model.config.get_text_config().num_hidden_layers
    lists = (found for found in decoder(model).modules() if isinstance(found, nn.ModuleList))
    blocks = next((found for found in lists if len(found) == layers), None)
    if blocks is None:
        raise not_packable(model, f"it has no list of its {layers} layers")
    return blocks


@contextmanager
def check_separation(model: PreTrainedModel, first: int) -> Iterator[None]:
    """Inside this context each layer is also run by itself on two packed sequences of `first` tokens each, and the
    model is refused if the outputs of one have a gradient in the other."""
    with ExitStack() as hooks:
        for number, block in enumerate(layer_list(model)):
            why = f"in layer {number}, a {type(block).__name__}, {_what_mixes(block)}"
            # This hook runs after those that gather a sharded block's weights.
            check = partial(_check_block, first, not_packable(model, why))
            hooks.enter_context(block.register_forward_pre_hook(check, with_kwargs=True))
        yield


def _what_mixes(block: nn.Module) -> str:
    """What a layer in which sequences mix computes, as far as its parts tell."""
    for part in block.modules():
        kind, own = type(part).__name__, {name for name, _ in part.named_parameters(recurse=False)}
        if own & _STATE_WEIGHTS or _STATEFUL.search(kind):
            return f"its {kind} passes a state from token to token, and so from one sequence to the next"
        if any(isinstance(child, nn.Conv1d) for child in part.children()):
            return f"its {kind} convolves over neighbouring tokens, also those of other sequences"
    return "tokens see those of other sequences, by something other than attention"


def _check_block(first: int, mixed: UserError, block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Raises `mixed` if the block's outputs for one sequence have a gradient in the other."""

    def by_token(some: object) -> bool:
        return isinstance(some, Tensor) and some.is_floating_point() and some.dim() > 1 and some.shape[-2] == 2 * first

    with torch.enable_grad():
        inputs = {id(some): some.detach().requires_grad_() for some in (*given, *named.values()) if by_token(some)}
        # Copies, because a block may change its input in place.
        copies = {place: some.clone() for place, some in inputs.items()}
        by_name = {name: copies.get(id(some), some) for name, some in named.items()}
        found = block.forward(*(copies.get(id(some), some) for some in given), **by_name)
    several = found if isinstance(found, tuple) else (found,)
    outputs = [some for some in several if by_token(some) and some.requires_grad]
    for others in (slice(first), slice(first, None)):  # The sequence in which there must be no gradient.
        weights = []
        for some in outputs:  # The weights are any numbers that do not cancel out.
            weight = torch.arange(some.numel(), device=some.device).sin().view_as(some).to(some.dtype)
            weight[..., others, :] = 0
            weights.append(weight)
        gradients = torch.autograd.grad(outputs, list(inputs.values()), weights, retain_graph=True, allow_unused=True)
        if any(some is not None and not some.isfinite().all() for some in (*outputs, *gradients)):
            raise not_finite(block)
        if not outputs or any(gradient is not None and gradient[..., others, :].any() for gradient in gradients):
            raise mixed
