"""The paged KV cache, and the attention function through which any transformers model reads and writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import PretrainedConfig

from ebbtide.errors import UserError
from ebbtide.model.attention_kind import AttentionKind
from ebbtide.model.output_head import head_matrix
from ebbtide.model.quantized_layers import quantized_of
from ebbtide.model.quantized_sizes import slice_numbers
from ebbtide.model.state_layers import StatePass, States
from ebbtide.policy.attention import FUNCTIONS, requested_kind, scaled_by_position, unsupported_layer
from ebbtide.policy.attention_calls import AttentionCall, record_calls
from ebbtide.rollout.paged.cache_costs import CacheCosts, LayerCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAGED = "ebbtide_paged"
WITHOUT_KEYS = {"linear_attention", "mamba", "conv", "recurrent", "moe", "mlp"}
"""The `layer_types` of configs whose layers have no keys and values."""


@dataclass(frozen=True)
class CacheLayout:
    """Which layers have keys and values in the KV cache, and of which sizes."""

    own: Mapping[int, LayerCache]
    """By the number of each layer that writes keys and values."""
    sources: Mapping[int, int]
    """Layer that calls attention -> the layer whose keys and values it reads: itself, or one before it."""
    queries_per_key: int
    """The most query heads that read one key-value head, in any layer."""

    def read_by(self, layer: int) -> LayerCache:
        """Returns the sizes of what a layer reads."""
        return self.own[self.sources[layer]]

    def shapes(self, slots: int) -> list[tuple[int, int, int]]:
        """Returns the shapes of the tensors of a KV cache of so many slots: the keys, then the values of each layer."""
        return [
            (slots, one.kv_heads, channels)
            for one in self.own.values()
            for channels in (one.key_channels, one.value_channels)
        ]


class KVCache:
    """The KV cache: for each layer a tensor of keys and one of values, with a slot for each token. They are separate
    tensors so that they fit into fragmented memory. The GPU kernels use another layout within each block."""

    def __init__(self, tensors: Sequence[Tensor], layout: CacheLayout, states: Sequence[States] = ()) -> None:
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        own = dict(zip(layout.own, pairs, strict=True))
        self.layers = {layer: own[source] for layer, source in layout.sources.items()}
        """(keys, values) that each layer reads: [slots, kv heads, channels]"""
        self.layout = layout
        self.states = states
        """The states of sequences [state slots, ...], of each layer that has some."""

    def addresses(self) -> list[list[int]]:
        """Returns the addresses of the keys and values that each layer reads, by the layer's number."""
        found = [[0, 0] for _ in range(1 + max(self.layers, default=-1))]
        for layer, (keys, values) in self.layers.items():
            found[layer] = [keys.data_ptr(), values.data_ptr()]
        return found


def cache_layout(model: PreTrainedModel) -> CacheLayout:
    """Returns what a loaded model's layers have in the KV cache: as they call attention, whatever its config says."""
    return layout_of(record_calls(model), model.config)


def layout_of(calls: Sequence[AttentionCall], config: PretrainedConfig) -> CacheLayout:
    """Returns the layout of a KV cache for a model whose layers call attention like this."""
    layers = [call.layer for call in calls if call.layer is not None]
    if len(set(layers)) < len(calls):
        raise paged_cannot_run(config, "a layer calls attention more than once, or has no number")
    if not calls:
        raise paged_cannot_run(config, "none of its layers attends, so that there is no KV cache")
    by_layer = {call.layer: call for call in calls if call.layer is not None}
    own = {layer: LayerCache(call.heads, *call.channels) for layer, call in by_layer.items() if call.source == layer}
    sources = {layer: call.source for layer, call in by_layer.items() if call.source is not None}
    return CacheLayout(own, sources, max(call.query_heads // call.heads for call in calls))


def cache_costs(model: PreTrainedModel, layout: CacheLayout) -> CacheCosts:
    """Returns the sizes of a loaded model, whose base may be quantized."""
    found = replace(model_cache_costs(model.config), layers=tuple(layout.own.values()))
    is_quantized = any(quantized_of(module) is not None for module in model.modules())
    blocks = 2 * found.mlp * found.hidden if is_quantized else 0
    matrix, _ = head_matrix(model)
    head = 0 if isinstance(matrix, Tensor) else slice_numbers(len(matrix.codes), matrix.columns)
    return replace(found, scratch=max(blocks, head))


def model_cache_costs(config: PretrainedConfig) -> CacheCosts:
    """Returns the sizes of a model that decide how much memory the paged engine needs for it, as its config has
    them."""
    text = config.get_text_config()
    count = int(text.num_hidden_layers)
    layers = [_of_layer(text, layer) for layer in range(count)]
    shared = int(getattr(text, "num_kv_shared_layers", None) or 0)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * count
    return CacheCosts(
        layers=tuple(
            layer.cache
            for number, layer in enumerate(layers)
            if number < count - shared and kinds[number] not in WITHOUT_KEYS
        ),
        hidden=int(text.hidden_size),
        queries=max(layer.queries for layer in layers),
        mlp=max(layer.mlp for layer in layers),
        vocabulary=int(text.vocab_size),
    )


class _LayerSizes(NamedTuple):
    """The sizes of one layer."""

    cache: LayerCache
    queries: int
    mlp: int


def _of_layer(text: PretrainedConfig, layer: int) -> _LayerSizes:
    by_layer = getattr(text, "per_layer_config", None)  # transformers' view of sizes that differ between layers
    sizes = by_layer[layer] if by_layer is not None else text
    heads = int(sizes.num_attention_heads)
    experts = int(getattr(sizes, "num_experts_per_tok", None) or 1)
    dense = max(_largest(getattr(sizes, name, None) or 0) for name in ("intermediate_size", "intermediate_size_mlp"))
    mlp = max(dense, experts * _largest(getattr(sizes, "moe_intermediate_size", None) or dense))
    if getattr(sizes, "kv_lora_rank", None):  # latent attention, whose keys and values are expanded for each head
        key = int(sizes.qk_nope_head_dim) + int(sizes.qk_rope_head_dim)
        return _LayerSizes(LayerCache(heads, key, int(sizes.v_head_dim)), heads * key, mlp)
    channels = int(getattr(sizes, "head_dim", None) or sizes.hidden_size // heads)
    kv_heads = int(getattr(sizes, "num_key_value_heads", None) or heads)
    values = int(getattr(sizes, "v_head_dim", None) or channels)
    return _LayerSizes(LayerCache(kv_heads, channels, values), heads * channels, mlp)


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

    def positions(self) -> Tensor:
        """Returns the position of each token in its sequence, [T]."""
        ...

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, kind: AttentionKind
    ) -> Tensor:
        """Writes the keys and values [T, kv heads, channels] of the new tokens to the cache, unless the layer shares
        another's, and returns the attention output [T, heads, value channels] of their queries [T, heads,
        channels]."""
        ...


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, channels]
    key: Tensor,  # [1, kv heads, T, channels]
    value: Tensor,  # [1, kv heads, T, value channels]
    attention_mask: None,
    scaling: float | None = None,
    *,
    paged_pass: AttentionPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns the attention output [1, T, heads, value channels]."""
    kind = requested_kind(module, attention_mask, kwargs)
    if paged_pass is None:
        raise unsupported_layer(module, "does not pass attention the KV cache (`paged_pass`)")
    query = scaled_by_position(module, query, paged_pass.positions)
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return paged_pass.attend(layer, q, k, v, scale, kind).unsqueeze(0), None


FUNCTIONS[PAGED] = paged_attention
