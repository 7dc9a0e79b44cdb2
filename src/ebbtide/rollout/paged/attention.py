"""The paged KV cache, and the attention function through which any transformers model reads and writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from transformers import PretrainedConfig

from ebbtide.errors import UserError
from ebbtide.model.quantize import quantized_of
from ebbtide.model.state_layers import StatePass, States
from ebbtide.policy.attention import FUNCTIONS, requested_window, unsupported_layer
from ebbtide.rollout.paged.cache_costs import CacheCosts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAGED = "ebbtide_paged"


class KVCache:
    """The KV cache: for each layer a tensor of keys and one of values, with a slot for each token. They are separate
    tensors so that they fit into fragmented memory. The GPU kernels use another layout within each block."""

    def __init__(self, tensors: Sequence[Tensor], states: Sequence[States] = ()) -> None:
        # (keys, values) of each layer: both [slots, kv heads, channels]
        self.layers = list(zip(tensors[::2], tensors[1::2], strict=True))
        self.states = states
        """The states of sequences [state slots, ...], of each layer that has some."""


def cache_costs(model: PreTrainedModel) -> CacheCosts:
    """Returns the sizes of a loaded model, whose base may be quantized."""
    found = model_cache_costs(model.config)
    is_quantized = any(quantized_of(module) is not None for module in model.modules())
    return replace(found, scratch=2 * found.mlp * found.hidden) if is_quantized else found


def model_cache_costs(config: PretrainedConfig) -> CacheCosts:
    """Returns the sizes of a model that decide how much memory the paged engine needs for it."""
    text = config.get_text_config()
    try:
        heads = int(text.num_attention_heads)
        experts = int(getattr(text, "num_experts_per_tok", None) or 1)
        sparse = experts * int(getattr(text, "moe_intermediate_size", None) or 0)
        return CacheCosts(
            layers=int(text.num_hidden_layers),
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            channels=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            hidden=int(text.hidden_size),
            query_heads=heads,
            mlp=max(_largest(getattr(text, "intermediate_size", 0)), sparse),
            vocabulary=int(text.vocab_size),
        )
    except RuntimeError:  # transformers raises this for a value that differs between layers
        raise paged_cannot_run(config, "its layers are of different sizes") from None


def _largest(size: int | Sequence[int]) -> int:
    """Returns the largest of a size that may be given as one number or as one per layer."""
    return int(size) if isinstance(size, int) else max(size)


def paged_cannot_run(config: PretrainedConfig, why: str) -> UserError:
    """Makes the error for a model that this engine cannot run and the huggingface engine can."""
    family = config.get_text_config().model_type
    other = "set `rollout.engine: huggingface` (`ebbtide serve` has no other engine)"
    return UserError(f"the paged engine cannot run `{family}` ({why}): {other}")


class AttentionPass(Protocol):
    """One pass through the model: it knows the KV cache, what each token attends to, and the states of sequences."""

    @property
    def states(self) -> StatePass | None:
        """Where the layers with states find those of the sequences; None if there are no such layers."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Writes the keys and values [T, kv heads, channels] of the new tokens to the cache, and returns the attention
        output [T, heads, channels] of their queries [T, heads, channels]."""
        ...


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, channels]
    key: Tensor,  # [1, kv heads, T, channels]
    value: Tensor,  # [1, kv heads, T, channels]
    attention_mask: None,
    scaling: float | None = None,
    *,
    paged_pass: AttentionPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns the attention output [1, T, heads, channels]."""
    window = requested_window(module, attention_mask, kwargs)
    if paged_pass is None:
        raise unsupported_layer(module, "does not pass attention the KV cache (`paged_pass`)")
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return paged_pass.attend(layer, q, k, v, scale, window).unsqueeze(0), None


FUNCTIONS[PAGED] = paged_attention
