"""What each family of models looks like: its modules' names, its config's keys, and how it differs from Llama.

A family is one entry of `FAMILIES`, found by its `model_type` in transformers. Plans, fused blocks, activations and
tensor parallelism read it. A model of any other family runs without an entry: where its modules have the usual names,
its activations can be placed by name as well. Its plan needs a trace (planner/trace.py), and fused blocks an entry.
Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ebbtide.config.memory import ActivationName
from ebbtide.errors import UserError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Family:
    """One family of models. A field's default is what most families have, and Llama is all defaults but for its files.

    A block is `x += attention(norm(x))`, then `x += mlp(norm(x))`, where the MLP is gated, or has such MLPs as experts.
    Some have two more norms, of what attention and MLP add, or only these. What differs in more than the fields below,
    as a block whose attention and MLP have the same input does, cannot be described by an entry.
    """

    # Its files

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values that transformers assumes for keys that a config.json leaves out, by their usual names."""

    config_keys: Mapping[str, str] = field(default_factory=dict)
    """The usual name of a key in config.json (`num_hidden_layers`) -> this family's name for it (`n_layer`), where they
    differ. Files with the usual name are read, too. Objects of transformers have the usual names as attributes."""

    gguf_name: str = ""
    """The architecture's name in GGUF files; empty if it is the `model_type`."""

    gguf_keys: Mapping[str, str] = field(default_factory=dict)
    """The name of a size in config.json -> where a GGUF file has it, for files that do not have it where others do."""

    # Its arithmetic

    qkv_bias: bool | str = "attention_bias"
    """Whether the matrices of queries, keys and values have biases, or the config's key that says so."""

    output_bias: bool | str = "attention_bias"
    """The same for the matrix after attention."""

    mlp_bias: bool | str = "mlp_bias"
    """The same for the matrices of the MLP."""

    window_in_config: bool = False
    """Whether every layer has the sliding window of the config. In other families a layer's attention has its own."""

    qk_norm: bool = False
    """Whether queries and keys are normalized: the channels of each head, or of all heads together."""

    qk_norm_over_heads: bool = False
    """Whether queries and keys are normalized over all heads together; else each head by itself."""

    sparse: bool = False
    """Whether it is a mixture of experts; single blocks of it may still have one MLP."""

    norm_offset: float = 0.0
    """What is added to the weight of a norm before the multiplication."""

    norm_in_float32: bool = False
    """Whether a norm multiplies by its weight before it rounds to the model's type. Then it saves the normalized input
    in float32."""

    embedding_scale: str = ""
    """The attribute of the config with the number by which the decoder multiplies embeddings; empty if there is none,
    or if the embedding's module multiplies by it."""

    residual_scale: str = ""
    """The attribute of a block with the number by which it multiplies the outputs of attention and MLP before they are
    added; empty if there is none."""

    rotates: str = ""
    """The attribute of a block's attention that says whether it has rotary embeddings; empty if all have."""

    rotates_if_sliding: bool = False
    """Whether, in a model with a sliding window, only layers that have it (`is_sliding`) have rotary embeddings."""

    partial_rotary: bool = False
    """Whether the config may say that only some channels of a head, the first ones, are rotated
    (`partial_rotary_factor`)."""

    interleaved_rotary: bool = False
    """Whether rotary embeddings rotate neighbouring channels; else those of the two halves of a head."""

    rotary_by_layer: bool = False
    """Whether the kinds of layers in `layer_types` have rotary embeddings of their own."""

    # The names of its modules: of the decoder's

    embedding: str = "embed_tokens"
    rotary: str = "rotary_emb"
    """The module that computes the angles (cos, sin) of rotary position embeddings."""
    layers: str = "layers"
    """The list of blocks."""
    last_norm: str = "norm"

    # and of a block's

    attn_norm: str = "input_layernorm"
    """The norm before attention, as `mlp_norm` is before the MLP; empty if there is none."""
    attention: str = "self_attn"
    query: str = "self_attn.q_proj"
    """Queries, keys and values may be one matrix, under one name, and so may the halves of the MLP."""
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    attn_post_norm: str = ""
    """The norm of what attention adds, and next that of what the MLP adds; empty if there is none."""
    mlp_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    activation: str = "mlp.act_fn"
    """The activation function between `gate` and the product with `up`. Fused blocks have SiLU and GELU with
    tanh."""
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    expert_activation: str = "mlp.experts.act_fn"

    norm_epsilon: str = "variance_epsilon"
    """The attribute of a norm with its epsilon."""

    def usual_config(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The contents of a config.json under the usual names, with this family's defaults for what it leaves out."""
        given = {key: value for key, value in found.items() if value is not None}
        renamed = {usual: given[own] for usual, own in self.config_keys.items() if own in given}
        return {**self.defaults, **given, **renamed}

    @property
    def attention_matrices(self) -> tuple[str, str, str, str]:
        return self.query, self.key, self.value, self.output

    @property
    def mlp_matrices(self) -> tuple[str, str, str]:
        return self.gate, self.up, self.down

    @property
    def adaptable(self) -> tuple[str, ...]:
        """The linear layers of a block that can have adapters: of a mixture of experts only attention's, even in blocks
        without experts."""
        return self.attention_matrices if self.sparse else (*self.attention_matrices, *self.mlp_matrices)

    @property
    def has_packed_qkv(self) -> bool:
        """Whether queries, keys and values are one matrix."""
        return self.query == self.value

    @property
    def has_packed_mlp(self) -> bool:
        """Whether both halves of the MLP are one matrix."""
        return self.gate == self.up

    @property
    def block_weights(self) -> set[str]:
        """The parameters that every block has, whatever its MLP."""
        return {f"{path}.weight" for path in (*self.stream_norms, *self.attention_matrices)}

    @property
    def stream_norms(self) -> tuple[str, ...]:
        """The norms that are as wide as the residual stream."""
        return tuple(path for path in (self.attn_norm, self.mlp_norm, *self.post_norms) if path)

    @property
    def post_norms(self) -> tuple[str, ...]:
        """The norms of what attention and MLP add."""
        return (self.attn_post_norm, self.mlp_post_norm) if self.attn_post_norm else ()

    @property
    def norms(self) -> dict[str, ActivationName]:
        """Norm of a block -> the name of what it saves."""
        named: dict[str, ActivationName] = {
            self.attn_norm: "attn_norm",
            self.query_norm: "qkv_linear",
            self.key_norm: "qkv_linear",
            self.mlp_norm: "mlp_norm",
        }
        return {path: name for path, name in named.items() if path}

    def scopes(self, *, sparse: bool) -> dict[str, ActivationName]:
        """Submodule of a block, with or without experts -> the name of what it saves. The name also covers the
        submodule's own arithmetic, outside the submodules below it."""
        after: dict[str, ActivationName] = dict(zip(self.post_norms, ("attn_proj", "mlp_fc2"), strict=False))
        before: dict[str, ActivationName] = after | {
            self.attention: "core_attn",
            **dict.fromkeys((self.query, self.key, self.value), "qkv_linear"),
            **self.norms,
            self.output: "attn_proj",
        }
        if sparse:
            routing: dict[str, ActivationName] = {self.mlp: "moe_router", self.router: "moe_router"}
            return before | routing | {self.experts: "moe_act", self.expert_activation: "moe_act"}
        halves: dict[str, ActivationName] = {self.gate: "mlp_fc1", self.up: "mlp_fc1"}
        return before | {self.mlp: "mlp_act"} | halves | {self.activation: "mlp_act", self.down: "mlp_fc2"}

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Module of the decoder -> how tensor parallelism shards it, in the words of transformers; empty for what it
        does not shard: experts, matrices that are packed into one, norms over all heads."""
        if self.sparse or self.has_packed_qkv or self.has_packed_mlp or self.qk_norm_over_heads:
            return {}
        columns, rows = (self.query, self.key, self.value, self.gate, self.up), (self.output, self.down)
        norms = (self.query_norm, self.key_norm) if self.qk_norm else ()
        styles = {"colwise": columns, "rowwise": rows, "replicated_with_grad_allreduce": norms}
        return {f"{self.layers}.*.{path}": style for style, paths in styles.items() for path in paths}


_ONLY_POST_NORMS: Mapping[str, Any] = {
    "attn_norm": "",
    "mlp_norm": "",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_OLMO: Mapping[str, Any] = {
    **_ONLY_POST_NORMS,
    "mlp_bias": False,
    "qk_norm": True,
    "qk_norm_over_heads": True,
    "norm_in_float32": True,
}
_GLM: Mapping[str, Any] = {
    "defaults": {
        "tie_word_embeddings": False,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
    },
    "output_bias": False,
    "mlp_bias": False,
    "partial_rotary": True,
    "interleaved_rotary": True,
    "gate": "mlp.gate_up_proj",
    "up": "mlp.gate_up_proj",
    "activation": "mlp.activation_fn",
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        defaults={"tie_word_embeddings": False, "num_key_value_heads": None},
        gguf_keys={"head_dim": "rope.dimension_count"},
    ),
    "mistral": Family(defaults={"tie_word_embeddings": False, "num_key_value_heads": 8}, window_in_config=True),
    "qwen2": Family(defaults={"tie_word_embeddings": False, "num_key_value_heads": 32}, qkv_bias=True),
    "qwen3": Family(
        defaults={"tie_word_embeddings": False, "num_key_value_heads": 32, "head_dim": 128},
        qk_norm=True,
    ),
    "qwen3_moe": Family(
        defaults={
            "tie_word_embeddings": False,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        config_keys={"num_experts": "num_local_experts"},
        gguf_name="qwen3moe",
        qk_norm=True,
        sparse=True,
    ),
    "smollm3": Family(
        defaults={"tie_word_embeddings": True, "num_key_value_heads": 4},
        rotates="use_rope",
    ),
    "granite": Family(
        defaults={"tie_word_embeddings": False, "num_key_value_heads": None},
        embedding_scale="embedding_multiplier",
        residual_scale="residual_multiplier",
    ),
    "ministral": Family(
        defaults={"tie_word_embeddings": False, "num_key_value_heads": 8},
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
    ),
    "seed_oss": Family(
        defaults={"tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        output_bias="attention_out_bias",
    ),
    "gemma": Family(
        defaults={"tie_word_embeddings": True, "num_key_value_heads": 16, "head_dim": 256},
        norm_offset=1.0,
        norm_in_float32=True,
        norm_epsilon="eps",
    ),
    "gemma3_text": Family(
        defaults={"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256},
        gguf_name="gemma3",
        qk_norm=True,
        norm_offset=1.0,
        norm_in_float32=True,
        norm_epsilon="eps",
        rotary_by_layer=True,
        attn_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    ),
    "olmo2": Family(defaults={"tie_word_embeddings": False, "num_key_value_heads": None}, **_OLMO),
    "olmo3": Family(
        defaults={"tie_word_embeddings": False, "num_key_value_heads": None}, rotary_by_layer=True, **_OLMO
    ),
    "exaone4": Family(
        defaults={"tie_word_embeddings": False, "num_key_value_heads": 32},
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=True,
        rotates_if_sliding=True,
        **_ONLY_POST_NORMS,
    ),
    "phi3": Family(
        defaults={"tie_word_embeddings": False, "num_key_value_heads": None},
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        window_in_config=True,
        partial_rotary=True,
        query="self_attn.qkv_proj",
        key="self_attn.qkv_proj",
        value="self_attn.qkv_proj",
        gate="mlp.gate_up_proj",
        up="mlp.gate_up_proj",
        activation="mlp.activation_fn",
    ),
    "glm": Family(**_GLM),
    "glm4": Family(
        attn_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
        **_GLM,
    ),
}
"""`model_type` in transformers -> the family, in the order in which messages list them."""

USUAL = Family()
"""What is assumed of a family without an entry."""


class UnknownFamilyError(UserError):
    """A model's family is not described in `FAMILIES`: a plan of it needs a trace."""


def family_named(model_type: str) -> Family:
    """The family with this `model_type`, or the usual one."""
    return FAMILIES.get(model_type, USUAL)


def family_of(module: nn.Module) -> Family:
    """The family of a model or of one of its blocks, or the usual one. A block's attention has the model's config,
    because transformers finds the attention function by it."""
    return family_named(next(_model_types(module), ""))


def _model_types(module: nn.Module) -> Iterator[str]:
    for each in module.modules():
        config: Any = getattr(each, "config", None)
        if hasattr(config, "get_text_config"):
            yield config.get_text_config().model_type


def has_bias(bias: bool | str, config: Mapping[str, Any]) -> bool:
    """Whether matrices have biases, by the family's field for them, in a model with this config."""
    return bool(config.get(bias, False)) if isinstance(bias, str) else bias


def part_of(module: Any, path: str) -> Any:
    """The part of a module at this path, or None."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
